"""From a model and a cluster to plans, best first: every layout of the grammar that can be, priced and ranked.

[Note: nothing that could win is left out]

Layouts that do the same work on every microbatch are a family: they differ in pp, zero and schedule alone. However a
family is laid over the devices, its work has to be done, so it has a bound: all of its work, spread evenly, with no
bubble and no message of gradients.

1. Families are sorted by their bounds. The first ones are opened until enough layouts fit that are faster than the next
   bound: no layout of a family that stays closed can be among the best.
2. Of an open family, layouts are dropped whose states alone, at their least, are more than the memory. The others are
   priced by formula, and asked for their memory in the order of their times.
3. The best are priced again by simulating their schedules, and sorted.

With layouts that cannot be run yet, the best are then tried with other kinds of tp, cp, recomputation and offload.

The same question has the same answer: nothing depends on chance or on time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from echelon.layout import Layout
from echelon.layout.layout import ASYNCHRONOUS
from echelon.plan.activations import kept, repeats_of
from echelon.plan.calibrate import calibrated
from echelon.plan.case import Case
from echelon.plan.cluster import Cluster
from echelon.plan.constants import FITTED, Constants
from echelon.plan.memory import worst
from echelon.plan.price import Plan, price
from echelon.plan.shape import ModelShape
from echelon.plan.time import microbatch, repeated, times
from echelon.plan.work import stacked, work_of

OBJECTIVES = ("time", "cost", "energy", "devices")
"""seconds of a step; US dollars, joules of a step; the fewest devices, then seconds"""
FINALISTS = 24
"""that are simulated, at least"""
MOST_CHUNKS = 8
LARGEST_MICROBATCH = 16
FEWER = 0.7
"""share of the devices that a layout must use, where all of them cannot be divided"""
FEWER_KINDS = 3
"""numbers of devices below all of them that are tried"""
SHORTEST = 1024
"""tokens of a slice of a sequence, at least: context parallelism is for long ones"""


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

    def case(self, layout: Layout) -> Case:
        return Case(
            shape=self.shape,
            cluster=self.cluster,
            layout=layout,
            seq_len=self.seq_len,
            precision=self.precision,
            correction=self.correction,
        )


@dataclass(frozen=True, kw_only=True, order=True)
class Family:
    """Layouts that do the same on every microbatch."""

    world: int
    tp: int
    cp: int
    ep: int
    microbatch: int
    recompute: str
    tp_kind: str = "1d"
    depth: int = 1
    cp_kind: str = "ring"

    def keys(self) -> dict[str, Any]:
        """Of the layout, but for dp and pp."""
        return {name: value for name, value in asdict(self).items() if name != "world"}

    def layout(self) -> Layout:
        """One of them, without a pipeline."""
        return Layout(dp=max(1, self.world // (self.tp * self.cp)), **self.keys())


Rated = tuple[float, str, Case]
"""what the objective asks to be small, the layout's text, the case"""


def search(wish: Wish, *, top: int = 10, c: Constants = FITTED) -> list[Plan]:
    """The best plans that fit; none where nothing does. See [Note: nothing that could win is left out]."""
    c, enough = calibrated(wish.cluster, c), max(FINALISTS, 2 * top)
    best: list[Rated] = []
    for bound, family in _bounds(wish, c):
        if len(best) == enough and bound > best[-1][0]:
            break
        limit = best[-1][0] if len(best) == enough else math.inf
        best = sorted([*best, *_fitting(wish, family, c, limit)], key=lambda one: one[:2])[:enough]
    if wish.plan_only:
        best = _refined(wish, best, c, enough)
    found = [price(case, c) for _, _, case in best]
    found.sort(key=lambda plan: (rank_of(wish, plan), str(plan.layout)))
    return found[:top]


def _refined(wish: Wish, best: list[Rated], c: Constants, enough: int) -> list[Rated]:
    """With other kinds of what the best are: grids of tp, ways of cp, more ways to recompute, states on the host.

    These are tried on the best layouts only: together with all others they would be too many to list.
    """
    found = {text: (rated, text, case) for rated, text, case in best}
    for _, _, case in best:
        for keys in _variants(wish, case.layout):
            other = replace(case, layout=replace(case.layout, **keys))
            if str(other.layout) not in found and worst(other, c).total <= wish.cluster.memory:
                seconds = np.array([times(work_of(other), c).total])
                found[str(other.layout)] = (float(rate(wish, [other], seconds)[0]), str(other.layout), other)
    return sorted(found.values(), key=lambda one: one[:2])[:enough]


def _variants(wish: Wish, layout: Layout) -> Iterator[dict[str, Any]]:
    free = {key for key in ("tp_kind", "cp_kind", "recompute", "offload") if key not in wish.fixed}
    for kind, depth in (("2d", 1), ("2.5d", 2), ("3d", 1)):
        asked = replace(wish, fixed={**wish.fixed, "tp_kind": kind, "depth": depth})
        if "tp_kind" in free and layout.tp > 1 and _tensor_kinds(asked, layout.tp):
            yield {"tp_kind": kind, "depth": depth}
    for kind in ("gather", "ulysses"):
        asked = replace(wish, fixed={**wish.fixed, "cp_kind": kind})
        if "cp_kind" in free and layout.cp > 1 and _context_kinds(asked, layout.tp, layout.cp):
            yield {"cp_kind": kind, "ulysses": layout.cp if kind == "ulysses" else 1}
    if "recompute" in free:
        yield from ({"recompute": kind} for kind in ("ops", "sqrt"))
    if "offload" in free:
        yield {"offload": "optimizer"}


def _bounds(wish: Wish, c: Constants) -> list[tuple[float, Family]]:
    """Families, and what the objective cannot be less than in each, best first."""
    every = [family for family in families(wish) if _least_memory(wish, family) <= wish.cluster.memory]
    if not every:
        return []
    cases = [wish.case(family.layout()) for family in every]
    works = stacked([work_of(case) for case in cases])
    m = microbatch(works, c)
    once = m.forward + m.backward + repeated(works, m) + m.tp + m.ep + m.cp + 3 * m.head
    spread = np.array([wish.batch / f.microbatch * f.tp * f.cp / f.world for f in every])
    bounds = rate(wish, cases, once * spread)
    return sorted(zip(bounds.tolist(), every, strict=True))


def _fitting(wish: Wish, family: Family, c: Constants, limit: float) -> Iterator[Rated]:
    """Those of a family that fit, with what the objective asks to be small; none at or above the limit."""
    cases = [
        wish.case(layout) for layout in members(wish, family) if _least_states(wish, layout) <= wish.cluster.memory
    ]
    if not cases:
        return
    seconds = times(stacked([work_of(case) for case in cases]), c).total
    for rated, case in zip(rate(wish, cases, seconds).tolist(), cases, strict=True):
        if rated < limit and worst(case, c).total <= wish.cluster.memory:
            yield rated, str(case.layout), case


def nearest(wish: Wish, c: Constants = FITTED) -> Plan | None:
    """Where nothing fits: the plan that needs the least memory."""
    # The least memory is where nothing that costs memory is chosen: small microbatches, full recomputation, zero 3.
    lean = [wish.case(layout) for layout in layouts(wish) if layout.recompute == "full" and layout.microbatch == 1]
    cases = lean or [wish.case(layout) for layout in layouts(wish)]
    if not cases:
        return None
    c = calibrated(wish.cluster, c)
    return price(min(cases, key=lambda case: (worst(case, c).total, str(case.layout))), c)


def rate(wish: Wish, cases: list[Case], seconds: np.ndarray) -> np.ndarray:
    """What the objective asks to be small."""
    worlds = np.array([case.layout.world for case in cases])
    if wish.objective == "devices":
        return np.asarray(worlds * 1e6 + seconds)
    device = wish.cluster.device
    each = {"time": 1.0, "cost": device.price / 3600, "energy": device.watts}[wish.objective]
    return np.asarray(seconds * each * (1.0 if wish.objective == "time" else worlds))


def rank_of(wish: Wish, plan: Plan) -> float:
    return float(rate(wish, [plan.case], np.array([plan.seconds]))[0])


# -- every layout -----------------------------------------------------------------------------------------------------


def layouts(wish: Wish) -> Iterator[Layout]:
    """Every layout that divides the model, the devices and the batch, with what is fixed."""
    for family in families(wish):
        yield from members(wish, family)


def families(wish: Wish) -> Iterator[Family]:
    fixed = wish.fixed
    sizes = [int(fixed["microbatch"])] if "microbatch" in fixed else range(1, LARGEST_MICROBATCH + 1)
    recomputes = ["none", "full", "selective"] if wish.plan_only else ["none", "full"]
    if "recompute" in fixed:
        recomputes = [str(fixed["recompute"])]
    for world in _worlds(wish):
        for tp, cp in _degrees(wish, world):
            kinds = product(
                _experts(wish, world), sizes, recomputes, _tensor_kinds(wish, tp), _context_kinds(wish, tp, cp)
            )
            for ep, size, recompute, (tp_kind, depth), cp_kind in kinds:
                if not wish.batch % size:
                    yield Family(
                        world=world,
                        tp=tp,
                        cp=cp,
                        ep=ep,
                        microbatch=size,
                        recompute=recompute,
                        tp_kind=tp_kind,
                        depth=depth,
                        cp_kind=cp_kind,
                    )


def members(wish: Wish, family: Family) -> Iterator[Layout]:
    fixed = wish.fixed
    for pp in _divisors(family.world // (family.tp * family.cp)):
        dp = family.world // (family.tp * family.cp * pp)
        per_rank, rest = divmod(wish.batch, dp)
        if rest or per_rank % family.microbatch or pp > wish.shape.num_layers or dp * family.tp * family.cp % family.ep:
            continue
        keys = {**family.keys(), "dp": dp, "pp": pp, "accumulate": per_rank // family.microbatch}
        for schedule, zero in product(_schedules(wish, pp), _zeros(wish, dp, family.tp, pp)):
            if schedule.get("schedule") in ASYNCHRONOUS and zero["zero"] > 1:
                continue
            chosen = {**fixed, **keys, **schedule, **zero}
            if all(chosen[key] == value for key, value in fixed.items()):
                layout = Layout(**chosen)
                if wish.plan_only or not layout.plan_only:
                    yield layout


def _worlds(wish: Wish) -> list[int]:
    """Numbers of devices to use: all, or fewer of those that divide in the most ways, where some must be left over."""
    devices, per_node = wish.cluster.devices, wish.cluster.per_node
    if wish.objective != "time":
        return [n for n in range(1, devices + 1) if n <= per_node or not n % per_node]
    step = 1 if devices <= 4 * per_node else per_node
    fewer = [n for n in range(max(1, int(FEWER * devices)), devices) if not n % step]
    return [devices, *sorted(fewer, key=lambda n: (-len(_divisors(n)), -n))[:FEWER_KINDS]]


def _degrees(wish: Wish, world: int) -> Iterator[tuple[int, int]]:
    """(tp, cp)."""
    shape, fixed = wish.shape, wish.fixed
    attention = next((layer.attention for layer, _ in shape.layers if layer.attention), None)
    widest = max(wish.cluster.per_node, int(fixed.get("tp", 1)))
    for tp in _divisors(world):
        if tp > widest or (attention is not None and not _splits(attention.heads, attention.kv_heads, tp)):
            continue
        for cp in _divisors(world // tp):
            asked = wish.plan_only or "cp" in fixed
            if cp == 1 or (asked and wish.seq_len % (2 * cp) == 0 and wish.seq_len >= cp * SHORTEST):
                yield tp, cp


def _tensor_kinds(wish: Wish, tp: int) -> list[tuple[str, int]]:
    """(tp_kind, depth) of tp ranks: flat, unless another kind is asked for."""
    kind, depth = str(wish.fixed.get("tp_kind", "1d")), int(wish.fixed.get("depth", 1))
    can = {
        "1d": depth == 1,
        "2d": math.isqrt(tp) ** 2 == tp and depth == 1,
        "2.5d": tp % depth == 0 and math.isqrt(tp // depth) ** 2 == tp // depth,
        "3d": round(tp ** (1 / 3)) ** 3 == tp and depth == 1,
    }
    return [(kind, depth)] if can[kind] and (tp > 1 or kind == "1d") else []


def _context_kinds(wish: Wish, tp: int, cp: int) -> list[str]:
    kind = str(wish.fixed.get("cp_kind", "ring"))
    heads = min((layer.attention.kv_heads for layer, _ in wish.shape.layers if layer.attention), default=0)
    if kind == "ulysses" and cp > 1 and (not heads or heads % (tp * cp)):
        return []
    return [kind] if cp > 1 or kind == "ring" else []


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


def _zeros(wish: Wish, dp: int, tp: int, pp: int) -> list[dict[str, int]]:
    if dp == 1:
        return [{"zero": 1 if pp > 1 else 0}]
    near = wish.cluster.per_node // tp
    inside = [{"zero": 3, "shard": near}] if 1 < near < dp and not dp % near else []
    return [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, *inside]


def _experts(wish: Wish, world: int) -> list[int]:
    if not wish.shape.experts or not (wish.plan_only or "ep" in wish.fixed):
        return [1]
    return [ep for ep in _divisors(world) if not wish.shape.experts % ep]


def _least_memory(wish: Wish, family: Family) -> float:
    """Bytes that no layout of a family can do without: states in as many shards as there are devices, and activations.

    The first stage of a pipeline of pp stages has pp microbatches in flight, each in 1 / pp of the layers: as much as
    one device without a pipeline, unless the step has too few microbatches to fill it.
    """
    case, shape = wish.case(family.layout()), wish.shape
    ranks = family.world / (family.tp * family.cp)
    filled = min(1.0, wish.batch / (ranks * family.microbatch))
    again = repeats_of(case)
    activations = sum(n * kept(case, layer, again) for layer, n in shape.layers) * filled
    if wish.fixed.get("schedule", "") in ("naive", "terapipe") or again.forward not in (0, 1):
        activations = 0.0
    if "offload" in wish.fixed:
        return 0.0
    return 16 * shape.parameters / family.world + activations


def _least_states(wish: Wish, layout: Layout) -> float:
    """Bytes that no rank of the layout can do without: its share of parameters, gradients and states."""
    shape = wish.shape
    if layout.offload != "none":
        return 0.0
    experts = sum(n * layer.expert_parameters for layer, n in shape.layers)
    layers = sum(n * layer.parameters for layer, n in shape.layers) - experts
    own = layers / (layout.tp * layout.pp) + experts / (layout.ep * layout.etp * layout.pp)
    data = layout.shards * layout.cp
    return own * {0: 18.0, 1: 6 + 12 / data, 2: 2 + 16 / data, 3: 16 / data}[layout.zero]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]
