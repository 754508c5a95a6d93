"""Every layout that can be: `Wish`, what is asked, and the families of layouts that answer it.

Layouts of a family do the same work on every microbatch: they differ in dp, pp, zero and schedule alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.rules import head_parallel_size
from echelon.planning.cost.expert_traffic import choose_ep_inner
from echelon.planning.model.model_shape import AttentionShape
from echelon.planning.scenario import PlanRequest

MAX_VPP = 8
MAX_MICROBATCH = 16
MIN_DEVICE_SHARE = 0.7
"""share of the devices that a layout must use, where all of them cannot be divided"""
NUM_SMALLER_WORLDS = 3
"""numbers of devices below all of them that are tried"""
MIN_CP_TOKENS, MIN_CP_TOKENS_FEW_SEQUENCES = 8192, 1024
"""tokens of a slice of a sequence, at least: context parallelism is for long ones. And where there are fewer sequences
than devices, so that something else must be divided"""
MIN_GRID_TP = 16
"""ranks of tp from which on grids are tried: of fewer, flat tp with sequence parallelism moves less"""


@dataclass(frozen=True, kw_only=True, order=True)
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

    def layout(self, **keys: int | str) -> Layout:
        return Layout(**{**asdict(self), **keys})


@dataclass(frozen=True, order=True)
class LayoutBranch:
    """Those of a family that have one pipeline over so many devices: they differ in zero and schedule alone."""

    family: LayoutFamily
    pp: int
    dp: int
    accumulate: int

    @property
    def world(self) -> int:
        return self.family.tp * self.family.cp * self.pp * self.dp


def all_layouts(request: PlanRequest) -> Iterator[Layout]:
    """Every layout that divides the model, the devices and the batch, with what is fixed."""
    for family, found in layout_branches(request).items():
        for branch in found:
            yield from branch_layouts(request, branch, asdict(family))


def layout_branches(request: PlanRequest) -> dict[LayoutFamily, list[LayoutBranch]]:
    """Every family with its branches."""
    found: dict[LayoutFamily, list[LayoutBranch]] = {}
    for world in _world_sizes(request):
        for tp, cp in _tp_cp_degrees(request, world):
            for family in _families(request, world, tp, cp):
                found.setdefault(family, []).extend(_pipelines(request, family, world))
    return found


def _families(request: PlanRequest, world: int, tp: int, cp: int) -> Iterator[LayoutFamily]:
    fixed = request.fixed
    sizes = [int(fixed["microbatch"])] if "microbatch" in fixed else range(1, MAX_MICROBATCH + 1)
    # What `ops` makes again is counted for our own models; others are tried with it where that is asked for.
    scenario = request.scenario(Layout())
    # Compression cannot pack what `ops` holds to repeat operators from.
    recomputes = [
        "none",
        *(["ops"] if scenario.has_counted_layers and not scenario.memory_options.compresses else []),
        "full",
    ]
    # Kernels that write no scores out leave next to nothing to save.
    recomputes += ["selective"] if scenario.materializes_scores else []
    if "recompute" in fixed:
        recomputes = [str(fixed["recompute"])]
    kinds = product(_ep_degrees(request, world), sizes, recomputes, tp_kinds(request, tp), cp_kinds(request, tp, cp))
    for (ep, ep_inner), size, recompute, (tp_kind, depth), (cp_kind, ulysses) in kinds:
        if not request.batch % size:
            yield LayoutFamily(
                tp=tp,
                cp=cp,
                ep=ep,
                ep_inner=ep_inner,
                microbatch=size,
                recompute=recompute,
                tp_kind=tp_kind,
                depth=depth,
                cp_kind=cp_kind,
                ulysses=ulysses,
            )


def _pipelines(request: PlanRequest, family: LayoutFamily, world: int) -> Iterator[LayoutBranch]:
    ranks = world // (family.tp * family.cp)
    for pp in _divisors(ranks):
        per_rank, rest = divmod(request.batch, ranks // pp)
        if rest or per_rank % family.microbatch or pp > request.shape.num_layers:
            continue
        branch = LayoutBranch(family, pp, ranks // pp, per_rank // family.microbatch)
        asked = {"pp": pp, "dp": branch.dp, "accumulate": branch.accumulate}
        if not world // pp % family.ep and all(request.fixed.get(key, value) == value for key, value in asked.items()):
            yield branch


def branch_layouts(request: PlanRequest, branch: LayoutBranch, keys: Mapping[str, Any]) -> Iterator[Layout]:
    """The layouts of a branch, whose family has these keys."""
    fixed, pp, dp = request.fixed, branch.pp, branch.dp
    keys = {**fixed, **keys, "dp": dp, "pp": pp, "accumulate": branch.accumulate}
    for schedule, zero in product(_schedule_options(request, pp), _zero_options(request, dp, branch.family, pp)):
        if schedule.get("schedule") in ASYNC_SCHEDULES and zero["zero"] > 1:
            continue
        chosen = {**keys, **schedule, **zero}
        if all(chosen[key] == value for key, value in fixed.items()):
            layout = Layout(**chosen)
            if request.allows(layout):
                yield layout


def _world_sizes(request: PlanRequest) -> list[int]:
    """Numbers of devices to use: all, or fewer of those that divide in the most ways, where some must be left over."""
    devices, per_node = request.cluster.devices, request.cluster.per_node
    if request.objective != "time":
        part = [n for n in _divisors(per_node) if n < devices]
        whole = [n * per_node for n in range(1, devices // per_node + 1) if _is_smooth(n)]
        return sorted({*part, *whole, devices})
    step = 1 if devices <= 4 * per_node else per_node
    fewer = [n for n in range(max(1, int(MIN_DEVICE_SHARE * devices)), devices) if not n % step]
    return [devices, *sorted(fewer, key=lambda n: (-len(_divisors(n)), -n))[:NUM_SMALLER_WORLDS]]


def _tp_cp_degrees(request: PlanRequest, world: int) -> Iterator[tuple[int, int]]:
    """(tp, cp)."""
    widest = max(request.cluster.per_node, int(request.fixed.get("tp", 1)))
    for tp in _divisors(world):
        if tp <= widest:
            yield from ((tp, cp) for cp in _divisors(world // tp) if can_split_sequence(request, cp))


def can_split_sequence(request: PlanRequest, cp: int) -> bool:
    """Sequences can be cut into so many slices, evenly, and slices are long enough."""
    if cp == 1:
        return True
    asked = request.plan_only or "cp" in request.fixed
    least = MIN_CP_TOKENS_FEW_SEQUENCES if asked or request.batch < request.cluster.devices else MIN_CP_TOKENS
    return (request.shape.supports_cp or asked) and request.seq_len % (2 * cp) == 0 and request.seq_len >= cp * least


def tp_kinds(request: PlanRequest, tp: int) -> list[tuple[str, int]]:
    """(tp_kind, depth) of tp ranks that divide the model's heads: flat, and grids where there are enough ranks."""
    fixed, sides = request.fixed, [("1d", 1)]
    if not request.shape.experts and (tp >= MIN_GRID_TP or "tp_kind" in fixed):
        sides += [("2d", 1), *(("2.5d", depth) for depth in _divisors(tp) if depth > 1), ("3d", 1)]
    attention = _model_attention(request)
    found = []
    for kind, depth in sides:
        side = head_parallel_size(Layout(tp=tp, tp_kind=kind, depth=depth))
        heads = attention is None or (side is not None and _divides_heads(attention.heads, attention.kv_heads, side))
        asked = fixed.get("tp_kind", kind) == kind and fixed.get("depth", depth) == depth
        if asked and side is not None and heads and (tp > 1 or kind == "1d"):
            found.append((kind, depth))
    return found


def cp_kinds(request: PlanRequest, tp: int, cp: int) -> list[tuple[str, int]]:
    """(cp_kind, ulysses) of cp ranks, each of which has the heads of a rank of tp."""
    fixed, attention = request.fixed, _model_attention(request)
    found = [("ring", 1)]
    if cp > 1 and attention is not None:
        heads, near = attention.heads // tp, max(2, request.cluster.per_node // tp)
        inner = [n for n in _divisors(cp) if 1 < n < cp and n <= max(near, int(fixed.get("ulysses", 1)))]
        every = [("gather", 1), ("ulysses", cp), *(("ring-ulysses", n) for n in inner)]
        found += [(kind, n) for kind, n in every if heads % n == 0]
    return [(kind, n) for kind, n in found if fixed.get("cp_kind", kind) == kind and fixed.get("ulysses", n) == n]


def _model_attention(request: PlanRequest) -> AttentionShape | None:
    return request.shape.attention


def _divides_heads(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _schedule_options(request: PlanRequest, pp: int) -> list[dict[str, int | str]]:
    if pp == 1:
        return [{}]
    layers, wanted = request.shape.num_layers, request.fixed.get("schedule", "")
    found: list[dict[str, int | str]] = [{"schedule": "1f1b"}, {"schedule": "zb-h1"}]
    found += [
        {"schedule": "interleaved", "vpp": chunks} for chunks in range(2, MAX_VPP + 1) if not layers % (pp * chunks)
    ]
    if 2 * pp <= layers:
        found += [{"schedule": "zb-v"}, {"schedule": "dualpipe-v"}]
    if wanted and wanted not in {one["schedule"] for one in found}:
        found.append({"schedule": wanted})  # other schedules change the mathematics, or never win: only when asked
    return found


def _zero_options(request: PlanRequest, dp: int, family: LayoutFamily, pp: int) -> list[dict[str, int]]:
    """Ranks of cp divide states too."""
    if dp * family.cp == 1:
        return [{"zero": 1 if pp > 1 else 0}]
    near = request.cluster.per_node // (family.tp * family.cp)
    inside = [{"zero": 3, "shard": near}] if 1 < near < dp and not dp % near else []
    return [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, *inside]


def _ep_degrees(request: PlanRequest, world: int) -> list[tuple[int, int]]:
    """(ep, ep_inner)."""
    shape, cluster = request.shape, request.cluster
    found = [ep for ep in _divisors(world) if not shape.experts % ep] if shape.experts else [1]
    asked = request.fixed.get("ep_inner")
    return [(ep, choose_ep_inner(cluster, ep, shape.top_k) if asked is None else int(asked)) for ep in found]


def _is_smooth(number: int) -> bool:
    """It has no prime factor but 2 and 3: numbers of nodes that divide well."""
    for prime in (2, 3):
        while not number % prime:
            number //= prime
    return number == 1


@lru_cache(maxsize=65536)
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if not number % n]
    return tuple(sorted({*small, *(number // n for n in small)}))
