"""From a model and a cluster to plans, best first: every layout of the grammar that can be, priced and ranked.

[Note: nothing that could win is left out]

Layouts that do the same work on every microbatch are a family, and those of them that have one pipeline over as many
devices a branch of it: they differ in zero and schedule alone. However it is scheduled, its work has to be done, so a
branch has a bound (bounds.py): all of its work, spread evenly, with the least bubble and no message of gradients.

1. Branches are sorted by their bounds. The first ones are opened until enough layouts fit that are faster than the next
   bound: no layout of a branch that stays closed can be among the best.
2. Of an open branch, layouts are dropped whose states and activations, at their least, are more than the memory. The
   others are priced by formula, and those that are fast enough are asked for their memory.
3. The best are priced again by simulating their schedules, and sorted.

Where repeating each layer by itself (recompute=full) does not fit, several are repeated at once (every:N), which takes
as long: so these need no families of their own. The best are then tried with a budget, which repeats no more layers
than it must (variants.py). Where nothing fits, the first kind of offload is searched with which something does, and
the best are tried with the others.

The same question has the same answer: nothing depends on chance or on time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np

from echelon.layout import Layout
from echelon.layout.rules import Facts, broken
from echelon.planning.calibrate.calibration import constants_of
from echelon.planning.calibrate.constants import FITTED, Constants
from echelon.planning.cost.memory_model import fits, worst
from echelon.planning.cost.step_time import times
from echelon.planning.cost.work import work_of, works_of
from echelon.planning.model.model_shape import RuleFacts
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import Case
from echelon.planning.search.bounds import bounds, least_bytes, rate
from echelon.planning.search.layout_families import Branch, Wish, layouts, members
from echelon.planning.search.memory_variants import AWAY, longer, variants

FINALISTS = 48
"""that are simulated, at least: where layers do not divide, the formula is up to a tenth off"""
BUDGETS = 12
"""of the best, those that are tried with a budget"""
GAIN = 0.01
"""share by which a budget must be faster than the best other way to recompute in the same layout, to be told"""
Rated = tuple[float, str, Case]
"""what the objective asks to be small, the layout's text, the case"""


def search(wish: Wish, *, top: int = 10, c: Constants = FITTED) -> list[Plan]:
    """The best plans that fit; none where nothing does. See [Note: nothing that could win is left out]."""
    if len({part.device.name for part in wish.cluster.parts}) > 1:
        return _of_parts(wish, top, c)
    found = _search(wish, wish, top, c)
    kind = "" if found else next(_away(wish, c), "")
    return _search(wish, replace(wish, fixed={**wish.fixed, "offload": kind}), top, c) if kind else found


def _away(wish: Wish, c: Constants) -> Iterator[str]:
    """What may leave the devices for something to fit; nothing where that does not help, or is fixed."""
    least = None if "offload" in wish.fixed else nearest(wish, c)
    if least is None or not least.case.on_gpu:
        return
    for kind in AWAY:
        case = replace(least.case, layout=replace(least.case.layout, offload=kind))
        if case.agrees and _is_legal(wish, case.layout) and fits(case, c):
            yield kind


def _search(wish: Wish, asked: Wish, top: int, c: Constants) -> list[Plan]:
    """What is asked fixes more than what is wished: the best are tried with other kinds of that too."""
    c, enough = constants_of(wish.case(Layout()), c), max(FINALISTS, 2 * top)
    best: list[Rated] = []
    for bound in bounds(asked, c):
        if len(best) == enough and bound.rated > best[-1][0]:
            break
        limit = best[-1][0] if len(best) == enough else math.inf
        found = _fitting(asked, bound.branch, bound.activations, c, limit)
        best = sorted([*best, *found], key=lambda one: one[:2])[:enough]
    best = _refined(wish, best, c, enough)
    plans = [price(case, c) for _, _, case in best]
    plans.sort(key=lambda plan: (rank_of(wish, plan), str(plan.layout)))
    return plans[:top]


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
    """With other kinds of what the best are.

    These are tried on the best layouts only: together with all others they would be too many to list.
    """
    found = {text: (rated, text, case) for rated, text, case in best}
    alike: dict[Layout, float] = {}
    for rated, _, case in reversed(best):
        alike[replace(case.layout, recompute="none")] = rated
    for number, (_, _, case) in enumerate(best):
        before = alike[replace(case.layout, recompute="none")]
        for other in variants(wish, case, c, budget=number < BUDGETS):
            text = str(other.layout)
            if text in found or not _is_legal(wish, other.layout) or not fits(other, c):
                continue
            rated = float(rate(wish, [other.layout.world], np.array([times(work_of(other), c).total]))[0])
            if rated < (1 - GAIN) * before or "budget" not in text:
                found[text] = (rated, text, other)
    return sorted(found.values(), key=lambda one: one[:2])[:enough]


def _fitting(wish: Wish, branch: Branch, activations: float, c: Constants, limit: float) -> Iterator[Rated]:
    """Those of a branch that fit, with what the objective asks to be small; none at or above the limit."""
    cases = [
        wish.case(layout)
        for layout in members(wish, branch, asdict(branch.family))
        if least_bytes(wish, layout, activations) <= wish.cluster.memory
    ]
    # Most are too slow before parameters and gradients are sent: those need not be counted.
    for once_a_step in (False, True):
        if not cases:
            return
        seconds = times(works_of(cases, once_a_step=once_a_step), c).total
        rated = rate(wish, [branch.world] * len(cases), seconds)
        found = [(r, case) for r, case in zip(rated.tolist(), cases, strict=True) if r < limit]
        cases = [case for _, case in found]
    for r, case in found:
        if not _is_legal(wish, case.layout):
            continue
        fitting = case if fits(case, c) else longer(wish, case, c)
        if fitting is not None:
            yield r, str(fitting.layout), fitting


def _is_legal(wish: Wish, layout: Layout) -> bool:
    """The layout breaks no rule of the grammar, of the model or of the batch."""
    facts = Facts(world=layout.world, batch=wish.batch, seq_len=wish.seq_len, model=RuleFacts(wish.shape))
    return not broken(layout, facts)


def nearest(wish: Wish, c: Constants = FITTED) -> Plan | None:
    """Where nothing fits: the plan that needs the least memory."""
    # The least memory is where nothing that costs memory is chosen: small microbatches, full recomputation.
    lean: dict[str, int | str] = {"microbatch": 1, "recompute": "full", "schedule": "1f1b"}
    asked = replace(wish, fixed={**lean, **wish.fixed})
    cases = [wish.case(layout) for layout in layouts(asked)] or [wish.case(layout) for layout in layouts(wish)]
    if not cases:
        return None
    c = constants_of(cases[0], c)
    return price(min(cases, key=lambda case: (worst(case, c).total, str(case.layout))), c)


def rank_of(wish: Wish, plan: Plan) -> float:
    return float(rate(wish, [plan.layout.world], np.array([plan.seconds]))[0])
