"""Every layout that can be: `Wish`, what is asked, and the families of layouts that answer it.

Layouts of a family do the same work on every microbatch: they differ in dp, pp, zero and schedule alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

from echelon.layout import Layout
from echelon.layout.layout import ASYNCHRONOUS
from echelon.layout.rules import tp_side
from echelon.optim.update_rule import Rule
from echelon.planning.calibrate.constants import IMBALANCE
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.cost.expert_traffic import inner_of
from echelon.planning.memory_options import Thrift
from echelon.planning.model.model_shape import Attention, ModelShape
from echelon.planning.scenario import NOTHING, Case, trains_in

OBJECTIVES = ("time", "cost", "energy", "devices")
"""seconds of a step; US dollars, joules of a step; the fewest devices, then seconds"""
MOST_CHUNKS = 8
LARGEST_MICROBATCH = 16
FEWER = 0.7
"""share of the devices that a layout must use, where all of them cannot be divided"""
FEWER_KINDS = 3
"""numbers of devices below all of them that are tried"""
SHORT, SHORTEST = 8192, 1024
"""tokens of a slice of a sequence, at least: context parallelism is for long ones. And where there are fewer sequences
than devices, so that something else must be divided"""
LEAST_GRID = 16
"""ranks of tp from which on grids are tried: of fewer, flat tp with sequence parallelism moves less"""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked."""

    shape: ModelShape
    cluster: Cluster
    batch: int
    """sequences of a step"""
    seq_len: int
    precision: str = "bf16"
    fixed: Mapping[str, int | str] = field(default_factory=dict)
    """keys of the layout that stay as they are given"""
    plan_only: bool = False
    """whether layouts count that cannot be run yet"""
    objective: str = "time"
    correction: float = 1.0
    """measured over predicted seconds of a run that was"""
    program: str = "echelon"
    """`echelon`, or `plain` without our kernels"""
    moment_bytes: float = 4
    """of one element of each of the optimizer's two moments; half of what it holds where it holds another number"""
    reduce_bytes: int = 4
    """of one element of a gradient on its way"""
    master_bytes: int = 4
    """of one element of what the optimizer updates: 2 without a master copy"""
    imbalance: float = IMBALANCE
    """rows of experts on the busiest of the ranks that divide them, to the mean"""
    rule: Rule | None = None
    """the optimizer; none: AdamW with such moments"""
    thrift: Thrift = NOTHING
    host: float | None = None
    """with `offload`, the share of the states that leave the device; none: as few as a GPU's memory asks for"""

    def case(self, layout: Layout) -> Case:
        return Case(
            shape=self.shape,
            cluster=self.cluster,
            layout=layout,
            seq_len=self.seq_len,
            precision=self.precision,
            correction=self.correction,
            program=self.program,
            moment_bytes=self.moment_bytes,
            reduce_bytes=self.reduce_bytes,
            master_bytes=self.master_bytes,
            imbalance=self.imbalance,
            rule=self.rule,
            thrift=self.thrift,
            host=self.host,
        )

    def allows(self, layout: Layout) -> bool:
        """It can be run, or need not be. No layout runs in a type that `train` lacks: that is told of the plans."""
        if self.plan_only:
            return True
        return not layout.plan_only and (self.precision != "fp8" or trains_in(self.precision, layout))


@dataclass(frozen=True, kw_only=True, order=True)
class Family:
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
class Branch:
    """Those of a family that have one pipeline over so many devices: they differ in zero and schedule alone."""

    family: Family
    pp: int
    dp: int
    accumulate: int

    @property
    def world(self) -> int:
        return self.family.tp * self.family.cp * self.pp * self.dp


def layouts(wish: Wish) -> Iterator[Layout]:
    """Every layout that divides the model, the devices and the batch, with what is fixed."""
    for family, found in branches(wish).items():
        for branch in found:
            yield from members(wish, branch, asdict(family))


def branches(wish: Wish) -> dict[Family, list[Branch]]:
    """Every family with its branches."""
    found: dict[Family, list[Branch]] = {}
    for world in _worlds(wish):
        for tp, cp in _degrees(wish, world):
            for family in _families(wish, world, tp, cp):
                found.setdefault(family, []).extend(_pipelines(wish, family, world))
    return found


def _families(wish: Wish, world: int, tp: int, cp: int) -> Iterator[Family]:
    fixed = wish.fixed
    sizes = [int(fixed["microbatch"])] if "microbatch" in fixed else range(1, LARGEST_MICROBATCH + 1)
    # What `ops` makes again is counted for our own models; others are tried with it where that is asked for.
    case = wish.case(Layout())
    # Compression cannot pack what `ops` holds to repeat operators from.
    recomputes = ["none", *(["ops"] if case.is_counted and not case.thrift.packs else []), "full"]
    # Kernels that write no scores out leave next to nothing to save.
    recomputes += ["selective"] if case.writes_scores else []
    if "recompute" in fixed:
        recomputes = [str(fixed["recompute"])]
    kinds = product(_experts(wish, world), sizes, recomputes, tensor_kinds(wish, tp), context_kinds(wish, tp, cp))
    for (ep, ep_inner), size, recompute, (tp_kind, depth), (cp_kind, ulysses) in kinds:
        if not wish.batch % size:
            yield Family(
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


def _pipelines(wish: Wish, family: Family, world: int) -> Iterator[Branch]:
    ranks = world // (family.tp * family.cp)
    for pp in _divisors(ranks):
        per_rank, rest = divmod(wish.batch, ranks // pp)
        if rest or per_rank % family.microbatch or pp > wish.shape.num_layers:
            continue
        branch = Branch(family, pp, ranks // pp, per_rank // family.microbatch)
        asked = {"pp": pp, "dp": branch.dp, "accumulate": branch.accumulate}
        if not world // pp % family.ep and all(wish.fixed.get(key, value) == value for key, value in asked.items()):
            yield branch


def members(wish: Wish, branch: Branch, keys: Mapping[str, Any]) -> Iterator[Layout]:
    """The layouts of a branch, whose family has these keys."""
    fixed, pp, dp = wish.fixed, branch.pp, branch.dp
    keys = {**fixed, **keys, "dp": dp, "pp": pp, "accumulate": branch.accumulate}
    for schedule, zero in product(_schedules(wish, pp), _zeros(wish, dp, branch.family, pp)):
        if schedule.get("schedule") in ASYNCHRONOUS and zero["zero"] > 1:
            continue
        chosen = {**keys, **schedule, **zero}
        if all(chosen[key] == value for key, value in fixed.items()):
            layout = Layout(**chosen)
            if wish.allows(layout):
                yield layout


def _worlds(wish: Wish) -> list[int]:
    """Numbers of devices to use: all, or fewer of those that divide in the most ways, where some must be left over."""
    devices, per_node = wish.cluster.devices, wish.cluster.per_node
    if wish.objective != "time":
        part = [n for n in _divisors(per_node) if n < devices]
        whole = [n * per_node for n in range(1, devices // per_node + 1) if _is_smooth(n)]
        return sorted({*part, *whole, devices})
    step = 1 if devices <= 4 * per_node else per_node
    fewer = [n for n in range(max(1, int(FEWER * devices)), devices) if not n % step]
    return [devices, *sorted(fewer, key=lambda n: (-len(_divisors(n)), -n))[:FEWER_KINDS]]


def _degrees(wish: Wish, world: int) -> Iterator[tuple[int, int]]:
    """(tp, cp)."""
    widest = max(wish.cluster.per_node, int(wish.fixed.get("tp", 1)))
    for tp in _divisors(world):
        if tp <= widest:
            yield from ((tp, cp) for cp in _divisors(world // tp) if cuts(wish, cp))


def cuts(wish: Wish, cp: int) -> bool:
    """Sequences can be cut into so many slices, evenly, and slices are long enough."""
    if cp == 1:
        return True
    asked = wish.plan_only or "cp" in wish.fixed
    least = SHORTEST if asked or wish.batch < wish.cluster.devices else SHORT
    return (wish.shape.can_cut or asked) and wish.seq_len % (2 * cp) == 0 and wish.seq_len >= cp * least


def tensor_kinds(wish: Wish, tp: int) -> list[tuple[str, int]]:
    """(tp_kind, depth) of tp ranks that divide the model's heads: flat, and grids where there are enough ranks."""
    fixed, sides = wish.fixed, [("1d", 1)]
    if not wish.shape.experts and (tp >= LEAST_GRID or "tp_kind" in fixed):
        sides += [("2d", 1), *(("2.5d", depth) for depth in _divisors(tp) if depth > 1), ("3d", 1)]
    attention = _attention(wish)
    found = []
    for kind, depth in sides:
        side = tp_side(Layout(tp=tp, tp_kind=kind, depth=depth))
        heads = attention is None or (side is not None and _splits(attention.heads, attention.kv_heads, side))
        asked = fixed.get("tp_kind", kind) == kind and fixed.get("depth", depth) == depth
        if asked and side is not None and heads and (tp > 1 or kind == "1d"):
            found.append((kind, depth))
    return found


def context_kinds(wish: Wish, tp: int, cp: int) -> list[tuple[str, int]]:
    """(cp_kind, ulysses) of cp ranks, each of which has the heads of a rank of tp."""
    fixed, attention = wish.fixed, _attention(wish)
    found = [("ring", 1)]
    if cp > 1 and attention is not None:
        heads, near = attention.heads // tp, max(2, wish.cluster.per_node // tp)
        inner = [n for n in _divisors(cp) if 1 < n < cp and n <= max(near, int(fixed.get("ulysses", 1)))]
        every = [("gather", 1), ("ulysses", cp), *(("ring-ulysses", n) for n in inner)]
        found += [(kind, n) for kind, n in every if heads % n == 0]
    return [(kind, n) for kind, n in found if fixed.get("cp_kind", kind) == kind and fixed.get("ulysses", n) == n]


def _attention(wish: Wish) -> Attention | None:
    return wish.shape.attention


def _splits(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _schedules(wish: Wish, pp: int) -> list[dict[str, int | str]]:
    if pp == 1:
        return [{}]
    layers, wanted = wish.shape.num_layers, wish.fixed.get("schedule", "")
    found: list[dict[str, int | str]] = [{"schedule": "1f1b"}, {"schedule": "zb-h1"}]
    found += [
        {"schedule": "interleaved", "vpp": chunks} for chunks in range(2, MOST_CHUNKS + 1) if not layers % (pp * chunks)
    ]
    if 2 * pp <= layers:
        found += [{"schedule": "zb-v"}, {"schedule": "dualpipe-v"}]
    if wanted and wanted not in {one["schedule"] for one in found}:
        found.append({"schedule": wanted})  # other schedules change the mathematics, or never win: only when asked
    return found


def _zeros(wish: Wish, dp: int, family: Family, pp: int) -> list[dict[str, int]]:
    """Ranks of cp divide states too."""
    if dp * family.cp == 1:
        return [{"zero": 1 if pp > 1 else 0}]
    near = wish.cluster.per_node // (family.tp * family.cp)
    inside = [{"zero": 3, "shard": near}] if 1 < near < dp and not dp % near else []
    return [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, *inside]


def _experts(wish: Wish, world: int) -> list[tuple[int, int]]:
    """(ep, ep_inner)."""
    shape, cluster = wish.shape, wish.cluster
    found = [ep for ep in _divisors(world) if not shape.experts % ep] if shape.experts else [1]
    asked = wish.fixed.get("ep_inner")
    return [(ep, inner_of(cluster, ep, shape.top_k) if asked is None else int(asked)) for ep in found]


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
