"""Every layout that a request admits, in families that do the same work on every microbatch.

Layouts of a family differ in dp, pp, zero and schedule alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.rules import head_parallel_size
from echelon.planning.calibrate.programs import OWN_PROGRAMS
from echelon.planning.cost.expert_traffic import choose_ep_inner
from echelon.planning.cost.program_memory import RECOMPUTED_MODULE_PROGRAMS, SAVED_OUTPUT_PROGRAMS
from echelon.planning.scenario import PlanRequest

MAX_VPP = 8
MAX_MICROBATCH = 16
MIN_DEVICE_SHARE = 0.7
"""share of the devices that a layout must use, if it cannot use all"""
NUM_SMALLER_WORLDS = 3
"""world sizes below all devices that the search tries"""
MIN_CP_TOKENS, MIN_CP_TOKENS_FEW_SEQUENCES = 8192, 1024
"""tokens of a sequence on a cp rank, at least: cp is for long sequences; and if there are fewer sequences than devices,
so that something else must be divided"""
MIN_GRID_TP = 16
"""tp from which the search tries grids: below it, 1d with sequence parallelism moves less"""


@dataclass(frozen=True, order=True)
class LayoutFamily:
    """Layouts that do the same on every microbatch."""

    tp: int
    cp: int
    ep: int
    ep_inner: int
    microbatch: int
    recompute: str
    tp_kind: str = "1d"
    depth: int = 1
    cp_kind: str = "ring"
    ulysses: int = 1


@dataclass(frozen=True, order=True)
class LayoutBranch:
    """The layouts of a family with the same pp and dp: they differ in zero and schedule alone."""

    family: LayoutFamily
    pp: int
    dp: int
    accumulate: int

    @property
    def world(self) -> int:
        return self.family.tp * self.family.cp * self.pp * self.dp


def all_layouts(request: PlanRequest) -> Iterator[Layout]:
    """Yield every layout that divides the model, the devices and the batch, with the fixed keys."""
    for branches in layout_branches(request).values():
        for branch in branches:
            yield from branch_layouts(request, branch)


def layout_branches(request: PlanRequest) -> dict[LayoutFamily, list[LayoutBranch]]:
    """Return every family with its branches."""
    branches: dict[LayoutFamily, list[LayoutBranch]] = {}
    for world in _world_sizes(request):
        for tp, cp in _tp_cp_degrees(request, world):
            for family in _families(request, world, tp, cp):
                branches.setdefault(family, []).extend(_pipelines(request, family, world))
    return branches


def _families(request: PlanRequest, world: int, tp: int, cp: int) -> Iterator[LayoutFamily]:
    fixed = request.fixed
    microbatches = [int(fixed["microbatch"])] if "microbatch" in fixed else range(1, MAX_MICROBATCH + 1)
    recomputes = [str(fixed["recompute"])] if "recompute" in fixed else _recompute_policies(request)
    divisors = [microbatch for microbatch in microbatches if not request.batch % microbatch]
    kinds = tp_kinds(request, tp), cp_kinds(request, tp, cp)
    for ep, microbatch, recompute, tp_kind, cp_kind in product(
        _ep_degrees(request, world), divisors, recomputes, *kinds
    ):
        yield LayoutFamily(tp, cp, *ep, microbatch, recompute, *tp_kind, *cp_kind)


def _recompute_policies(request: PlanRequest) -> list[str]:
    policies = ["none", "full"]
    # What `ops` saves is counted for Echelon's models alone, and compression cannot compress what it recomputes from.
    if request.has_counted_layers and not request.memory_options.compresses:
        policies.insert(1, "ops")
    if request.program in RECOMPUTED_MODULE_PROGRAMS:
        policies.insert(1, "ops")
    # Without materialized scores `selective` saves next to nothing, but for programs that save outputs of GEMMs.
    saves = request.scenario(Layout()).materializes_scores or request.program in SAVED_OUTPUT_PROGRAMS
    return [*policies, "selective"] if saves else policies


def _pipelines(request: PlanRequest, family: LayoutFamily, world: int) -> Iterator[LayoutBranch]:
    ranks = world // (family.tp * family.cp)
    supports_pp = request.shape.support.pp or _requests(request, "pp")
    for pp in _divisors(ranks) if supports_pp else (1,):
        per_rank, rest = divmod(request.batch, ranks // pp)
        if rest or per_rank % family.microbatch or pp > request.shape.num_layers:
            continue
        branch = LayoutBranch(family, pp, ranks // pp, per_rank // family.microbatch)
        keys = {"pp": pp, "dp": branch.dp, "accumulate": branch.accumulate}
        if not world // pp % family.ep and all(request.fixed.get(key, value) == value for key, value in keys.items()):
            yield branch


def branch_layouts(request: PlanRequest, branch: LayoutBranch) -> Iterator[Layout]:
    fixed, pp, dp = request.fixed, branch.pp, branch.dp
    keys = {**fixed, **vars(branch.family), "dp": dp, "pp": pp, "accumulate": branch.accumulate}
    keys = {**_forced_sp(request, branch.family.tp), **keys}
    for schedule, zero in product(_schedule_options(request, pp), _zero_options(request, dp, branch.family, pp)):
        if schedule.get("schedule") in ASYNC_SCHEDULES and zero["zero"] > 1:
            continue
        chosen = {**keys, **schedule, **zero}
        if all(chosen[key] == value for key, value in fixed.items()):
            layout = Layout(**chosen)
            if request.allows(layout):
                yield layout


def _world_sizes(request: PlanRequest) -> list[int]:
    """World sizes to try: all devices, and smaller numbers with the most divisors."""
    devices, per_node = request.cluster.devices, request.cluster.per_node
    if request.objective != "time":
        within_node = [n for n in _divisors(per_node) if n < devices]
        full_nodes = [n * per_node for n in range(1, devices // per_node + 1) if _is_smooth(n)]
        return sorted({*within_node, *full_nodes, devices})
    step = 1 if devices <= 4 * per_node else per_node
    fewer = [n for n in range(max(1, int(MIN_DEVICE_SHARE * devices)), devices) if not n % step]
    return [devices, *sorted(fewer, key=lambda n: (-len(_divisors(n)), -n))[:NUM_SMALLER_WORLDS]]


def _tp_cp_degrees(request: PlanRequest, world: int) -> Iterator[tuple[int, int]]:
    """Yield (tp, cp)."""
    widest = max(request.cluster.per_node, int(request.fixed.get("tp", 1)))
    for tp in _divisors(world):
        if tp <= widest and (tp == 1 or request.shape.support.tp or _requests(request, "tp")):
            yield from ((tp, cp) for cp in _divisors(world // tp) if can_split_sequence(request, cp))


def can_split_sequence(request: PlanRequest, cp: int) -> bool:
    """Whether cp divides the sequences evenly into slices that are long enough."""
    if cp == 1:
        return True
    requested = _requests(request, "cp")
    few_sequences = requested or request.batch < request.cluster.devices
    min_tokens = MIN_CP_TOKENS_FEW_SEQUENCES if few_sequences else MIN_CP_TOKENS
    is_supported = request.shape.support.cp or requested
    return is_supported and request.seq_len % (2 * cp) == 0 and request.seq_len >= cp * min_tokens


def _requests(request: PlanRequest, axis: str) -> bool:
    """Whether the user asks for layouts with this axis, whether the model supports it or not."""
    return request.plan_only or axis in request.fixed


def tp_kinds(request: PlanRequest, tp: int) -> list[tuple[str, int]]:
    """Return (tp_kind, depth) that divide the model's heads: 1d, and grids if there are enough ranks."""
    fixed, attention = request.fixed, request.shape.attention
    kinds = [("1d", 1)]
    if tp > 1 and not request.shape.experts and (tp >= MIN_GRID_TP or "tp_kind" in fixed):
        kinds += [("2d", 1), *(("2.5d", depth) for depth in _divisors(tp) if depth > 1), ("3d", 1)]

    def is_possible(kind: str, depth: int) -> bool:
        layout = Layout(tp=tp, tp_kind=kind, depth=depth, **_forced_sp(request, tp))
        if fixed.get("tp_kind", kind) != kind or fixed.get("depth", depth) != depth or not request.allows(layout):
            return False
        ranks = head_parallel_size(layout)
        if ranks is None or attention is None:
            return ranks is not None
        heads, kv_heads = attention.heads, attention.kv_heads
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    return [(kind, depth) for kind, depth in kinds if is_possible(kind, depth)]


def _forced_sp(request: PlanRequest, tp: int) -> dict[str, Any]:
    """The key `sp`, where the model's table does not support what is its default."""
    return {"sp": 0} if tp > 1 and not request.shape.support.sp else {}


def cp_kinds(request: PlanRequest, tp: int, cp: int) -> list[tuple[str, int]]:
    """Return (cp_kind, ulysses) of cp ranks, each with the heads of a tp rank."""
    fixed, attention = request.fixed, request.shape.attention
    kinds = [("ring", 1)]
    if cp > 1 and attention is not None:
        heads, ranks_per_node = attention.heads // tp, max(2, request.cluster.per_node // tp)
        max_ulysses = max(ranks_per_node, int(fixed.get("ulysses", 1)))
        degrees = [n for n in _divisors(cp) if 1 < n < cp and n <= max_ulysses]
        others = [("gather", 1), ("ulysses", cp), *(("ring-ulysses", n) for n in degrees)]
        kinds += [(kind, n) for kind, n in others if heads % n == 0]
    return [(kind, n) for kind, n in kinds if fixed.get("cp_kind", kind) == kind and fixed.get("ulysses", n) == n]


def _schedule_options(request: PlanRequest, pp: int) -> list[dict[str, int | str]]:
    if pp == 1:
        return [{}]
    layers, fixed = request.shape.num_layers, request.fixed.get("schedule", "")
    options: list[dict[str, int | str]] = [{"schedule": "1f1b"}, {"schedule": "zb-h1"}]
    chunks = [vpp for vpp in range(2, MAX_VPP + 1) if not layers % (pp * vpp)]
    options += [{"schedule": "interleaved", "vpp": vpp} for vpp in chunks]
    if 2 * pp <= layers:
        options += [{"schedule": "zb-v"}, {"schedule": "dualpipe-v"}]
    if fixed and fixed not in {option["schedule"] for option in options}:
        options.append({"schedule": fixed})  # other schedules change the mathematics, or never win
    return options


def _zero_options(request: PlanRequest, dp: int, family: LayoutFamily, pp: int) -> list[dict[str, int]]:
    """ZeRO stages, and HSDP inside a node; cp ranks shard states too."""
    if dp * family.cp == 1:
        return [{"zero": 1 if pp > 1 else 0}]
    in_node = request.cluster.per_node // (family.tp * family.cp)
    group, experts = in_node * family.tp * family.cp, family.ep * int(request.fixed.get("etp", 1))
    fits = 1 < in_node < dp and not dp % in_node and (not group % experts or not experts % group)
    hsdp = [{"zero": 3, "shard": in_node}] if fits else []
    # Other programs reduce once a step under a pipeline: zero=2 is zero=1 there.
    stages = (0, 1, 3) if pp > 1 and request.program not in OWN_PROGRAMS else (0, 1, 2, 3)
    return [*({"zero": zero} for zero in stages), *hsdp]


def _ep_degrees(request: PlanRequest, world: int) -> list[tuple[int, int]]:
    """Return (ep, ep_inner)."""
    shape, cluster = request.shape, request.cluster
    is_supported = shape.support.ep or _requests(request, "ep")
    degrees = [ep for ep in _divisors(world) if not shape.experts % ep] if shape.experts and is_supported else [1]
    fixed = request.fixed.get("ep_inner")

    def inner(ep: int) -> int:
        if fixed is not None or not shape.support.etp:
            return int(fixed or 1)
        return choose_ep_inner(cluster, ep, shape.top_k)

    return [(ep, inner(ep)) for ep in degrees]


def _is_smooth(number: int) -> bool:
    """Whether it has no prime factors but 2 and 3."""
    for prime in (2, 3):
        while not number % prime:
            number //= prime
    return number == 1


@lru_cache(maxsize=65536)
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if not number % n]
    return tuple(sorted({*small, *(number // n for n in small)}))
