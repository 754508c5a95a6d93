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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from echelon.layout import Layout
from echelon.layout.rules import Facts, broken
from echelon.plan.activations import kept, repeats_of
from echelon.plan.calibrate import constants_of
from echelon.plan.case import Case
from echelon.plan.constants import FITTED, Constants
from echelon.plan.layouts import Family, Wish, context_kinds, families, layouts, members, tensor_kinds
from echelon.plan.memory import worst
from echelon.plan.price import Plan, price
from echelon.plan.shape import RuleFacts
from echelon.plan.time import microbatch, repeated, times
from echelon.plan.units import MASTER_BYTES, MOMENTS, gradient_bytes
from echelon.plan.work import stacked, work_of

FINALISTS = 24
"""that are simulated, at least"""
Rated = tuple[float, str, Case]
"""what the objective asks to be small, the layout's text, the case"""


def search(wish: Wish, *, top: int = 10, c: Constants = FITTED) -> list[Plan]:
    """The best plans that fit; none where nothing does. See [Note: nothing that could win is left out]."""
    if len({part.device.name for part in wish.cluster.parts}) > 1:
        return _of_parts(wish, top, c)
    c, enough = constants_of(wish.case(Layout()), c), max(FINALISTS, 2 * top)
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


def _of_parts(wish: Wish, top: int, c: Constants) -> list[Plan]:
    """Of a cluster of several kinds: on all of it, as fast as its slowest, or on the devices of one kind alone."""
    kinds = {part.device.name: part.device for part in wish.cluster.parts}
    slowest = replace(wish.cluster, parts=tuple(replace(p, device=wish.cluster.device) for p in wish.cluster.parts))
    alone = [
        replace(
            wish.cluster,
            parts=tuple(part for part in wish.cluster.parts if part.device.name == name),
            inside=device.inside,
            outside=device.outside,
        )
        for name, device in kinds.items()
    ]
    found = [plan for cluster in (slowest, *alone) for plan in search(replace(wish, cluster=cluster), top=top, c=c)]
    return sorted(found, key=lambda plan: (rank_of(wish, plan), str(plan.layout)))[:top]


def _refined(wish: Wish, best: list[Rated], c: Constants, enough: int) -> list[Rated]:
    """With other kinds of what the best are: grids of tp, ways of cp, more ways to recompute, states on the host.

    These are tried on the best layouts only: together with all others they would be too many to list.
    """
    found = {text: (rated, text, case) for rated, text, case in best}
    for _, _, case in best:
        for keys in _variants(wish, case.layout):
            other = replace(case, layout=replace(case.layout, **keys))
            if not _is_legal(wish, other.layout):
                continue
            if str(other.layout) not in found and worst(other, c).total <= wish.cluster.memory:
                seconds = np.array([times(work_of(other), c).total])
                found[str(other.layout)] = (float(rate(wish, [other], seconds)[0]), str(other.layout), other)
    return sorted(found.values(), key=lambda one: one[:2])[:enough]


def _variants(wish: Wish, layout: Layout) -> Iterator[dict[str, Any]]:
    free = {key for key in ("tp_kind", "cp_kind", "recompute", "offload") if key not in wish.fixed}
    for kind, depth in (("2d", 1), ("2.5d", 2), ("3d", 1)):
        asked = replace(wish, fixed={**wish.fixed, "tp_kind": kind, "depth": depth})
        if "tp_kind" in free and layout.tp > 1 and tensor_kinds(asked, layout.tp):
            yield {"tp_kind": kind, "depth": depth}
    for kind in ("gather", "ulysses"):
        asked = replace(wish, fixed={**wish.fixed, "cp_kind": kind})
        if "cp_kind" in free and layout.cp > 1 and context_kinds(asked, layout.tp, layout.cp):
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
    # What is moved once a step is least in a microbatch where a step has the most of them.
    cases = [wish.case(replace(family.layout(), accumulate=wish.batch // family.microbatch)) for family in every]
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
        if rated < limit and worst(case, c).total <= wish.cluster.memory and _is_legal(wish, case.layout):
            yield rated, str(case.layout), case


def _is_legal(wish: Wish, layout: Layout) -> bool:
    """The layout breaks no rule of the grammar, of the model or of the batch."""
    facts = Facts(world=layout.world, batch=wish.batch, seq_len=wish.seq_len, model=RuleFacts(wish.shape))
    return not broken(layout, facts)


def nearest(wish: Wish, c: Constants = FITTED) -> Plan | None:
    """Where nothing fits: the plan that needs the least memory."""
    # The least memory is where nothing that costs memory is chosen: small microbatches, full recomputation, zero 3.
    lean = [wish.case(layout) for layout in layouts(wish) if layout.recompute == "full" and layout.microbatch == 1]
    cases = lean or [wish.case(layout) for layout in layouts(wish)]
    if not cases:
        return None
    c = constants_of(cases[0], c)
    return price(min(cases, key=lambda case: (worst(case, c).total, str(case.layout))), c)


def rate(wish: Wish, cases: list[Case], seconds: np.ndarray) -> np.ndarray:
    """What the objective asks to be small."""
    worlds = np.array([case.layout.world for case in cases])
    if wish.objective == "devices":
        return np.asarray(worlds * 1e6 + seconds)
    if wish.objective == "time":
        return np.asarray(seconds)
    devices = [case.cluster.device for case in cases]
    each = np.array([d.price / 3600 if wish.objective == "cost" else d.watts for d in devices])
    return np.asarray(seconds * each * worlds)


def rank_of(wish: Wish, plan: Plan) -> float:
    return float(rate(wish, [plan.case], np.array([plan.seconds]))[0])


# -- bounds of memory --------------------------------------------------------------------------------------------------


def _least_memory(wish: Wish, family: Family) -> float:
    """Bytes that no layout of a family can do without: states in as many shards as there are devices, and activations.

    Gradients need not be there when all activations are. The first stage of a pipeline of pp stages has pp microbatches
    in flight, each in 1 / pp of the layers: as much as one device without a pipeline, unless the step has too few
    microbatches to fill it.
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
    return (MASTER_BYTES + MOMENTS * wish.moment_bytes) * shape.parameters / family.world + activations


def _least_states(wish: Wish, layout: Layout) -> float:
    """Bytes that no rank of the layout can do without: its share of parameters, gradients and states."""
    shape, case = wish.shape, wish.case(layout)
    if layout.offload != "none":
        return 0.0
    experts = sum(n * layer.expert_parameters for layer, n in shape.layers)
    layers = sum(n * layer.parameters for layer, n in shape.layers) - experts
    own = layers / (layout.tp * layout.pp)
    spread = experts / (layout.ep * layout.etp * layout.pp)
    data = layout.dp * layout.cp
    compute, gradient = case.element_bytes, gradient_bytes(case)
    beside = MASTER_BYTES - compute + MOMENTS * case.moment_bytes
    # Under zero 1 to 3: what is whole on a rank, and what is divided.
    whole, divided = {
        0: (compute + gradient + beside, 0),
        1: (compute + gradient, beside),
        2: (compute, gradient + beside),
        3: (0, compute + gradient + beside),
    }[layout.zero]
    return sum(
        count * (whole + divided / ranks)
        for count, ranks in ((own, data), (spread, max(1, data * layout.tp // (layout.ep * layout.etp))))
    )
