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
from echelon.layout.rules import LayoutConstraints, find_violations
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.count_work import count_stacked_work, count_work
from echelon.planning.cost.memory_model import fits, peak_memory
from echelon.planning.cost.step_time import step_times
from echelon.planning.model.model_shape import RuleFacts
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.bounds import branch_bounds, min_memory_bytes, objective_values
from echelon.planning.search.layout_families import LayoutBranch, all_layouts, branch_layouts
from echelon.planning.search.memory_variants import OFFLOAD_OPTIONS, memory_variants, with_segments

MIN_FINALISTS = 48
"""that are simulated, at least: where layers do not divide, the formula is up to a tenth off"""
NUM_BUDGET_TRIALS = 12
"""of the best, those that are tried with a budget"""
MIN_BUDGET_GAIN = 0.01
"""share by which a budget must be faster than the best other way to recompute in the same layout, to be told"""
RatedScenario = tuple[float, str, Scenario]
"""what the objective asks to be small, the layout's text, the scenario"""


def search_plans(request: PlanRequest, *, top: int = 10, c: Constants = FITTED_CONSTANTS) -> list[Plan]:
    """The best plans that fit; none where nothing does. See [Note: nothing that could win is left out]."""
    if len({part.device.name for part in request.cluster.node_groups}) > 1:
        return _search_mixed_cluster(request, top, c)
    found = _search(request, request, top, c)
    kind = "" if found else next(_offload_that_fits(request, c), "")
    return _search(request, replace(request, fixed={**request.fixed, "offload": kind}), top, c) if kind else found


def _offload_that_fits(request: PlanRequest, c: Constants) -> Iterator[str]:
    """What may leave the devices for something to fit; nothing where that does not help, or is fixed."""
    least = None if "offload" in request.fixed else least_memory_plan(request, c)
    if least is None or not least.scenario.on_gpu:
        return
    for kind in OFFLOAD_OPTIONS:
        scenario = replace(least.scenario, layout=replace(least.scenario.layout, offload=kind))
        if scenario.is_compatible and _is_legal(request, scenario.layout) and fits(scenario, c):
            yield kind


def _search(request: PlanRequest, asked: PlanRequest, top: int, c: Constants) -> list[Plan]:
    """What is asked fixes more than what is wished: the best are tried with other kinds of that too."""
    c, enough = constants_for(request.scenario(Layout()), c), max(MIN_FINALISTS, 2 * top)
    best: list[RatedScenario] = []
    for bound in branch_bounds(asked, c):
        if len(best) == enough and bound.objective > best[-1][0]:
            break
        limit = best[-1][0] if len(best) == enough else math.inf
        found = _fitting_scenarios(asked, bound.branch, bound.activation_bytes, c, limit)
        best = sorted([*best, *found], key=lambda one: one[:2])[:enough]
    best = _refine(request, best, c, enough)
    plans = [price(scenario, c) for _, _, scenario in best]
    plans.sort(key=lambda plan: (plan_objective(request, plan), str(plan.layout)))
    return plans[:top]


def _search_mixed_cluster(request: PlanRequest, top: int, c: Constants) -> list[Plan]:
    """Of a cluster of several kinds: on all of it, as fast as its slowest, or on the devices of one kind alone."""
    kinds = {part.device.name: part.device for part in request.cluster.node_groups}
    slowest = replace(
        request.cluster,
        node_groups=tuple(replace(p, device=request.cluster.device) for p in request.cluster.node_groups),
    )
    alone = [
        replace(
            request.cluster,
            node_groups=tuple(part for part in request.cluster.node_groups if part.device.name == name),
            intra_node=device.intra_node,
            inter_node=device.inter_node,
        )
        for name, device in kinds.items()
    ]
    found = [
        plan for cluster in (slowest, *alone) for plan in search_plans(replace(request, cluster=cluster), top=top, c=c)
    ]
    return sorted(found, key=lambda plan: (plan_objective(request, plan), str(plan.layout)))[:top]


def _refine(request: PlanRequest, best: list[RatedScenario], c: Constants, enough: int) -> list[RatedScenario]:
    """With other kinds of what the best are.

    These are tried on the best layouts only: together with all others they would be too many to list.
    """
    found = {text: (rated, text, scenario) for rated, text, scenario in best}
    alike: dict[Layout, float] = {}
    for rated, _, scenario in reversed(best):
        alike[replace(scenario.layout, recompute="none")] = rated
    for number, (_, _, scenario) in enumerate(best):
        before = alike[replace(scenario.layout, recompute="none")]
        for other in memory_variants(request, scenario, c, budget=number < NUM_BUDGET_TRIALS):
            text = str(other.layout)
            if text in found or not _is_legal(request, other.layout) or not fits(other, c):
                continue
            rated = float(
                objective_values(request, [other.layout.world], np.array([step_times(count_work(other), c).total]))[0]
            )
            if rated < (1 - MIN_BUDGET_GAIN) * before or "budget" not in text:
                found[text] = (rated, text, other)
    return sorted(found.values(), key=lambda one: one[:2])[:enough]


def _fitting_scenarios(
    request: PlanRequest, branch: LayoutBranch, activations: float, c: Constants, limit: float
) -> Iterator[RatedScenario]:
    """Those of a branch that fit, with what the objective asks to be small; none at or above the limit."""
    scenarios = [
        request.scenario(layout)
        for layout in branch_layouts(request, branch, asdict(branch.family))
        if min_memory_bytes(request, layout, activations) <= request.cluster.memory
    ]
    # Most are too slow before parameters and gradients are sent: those need not be counted.
    for once_a_step in (False, True):
        if not scenarios:
            return
        seconds = np.asarray(step_times(count_stacked_work(scenarios, include_per_step=once_a_step), c).total)
        rated = objective_values(request, [branch.world] * len(scenarios), seconds)
        found = [(r, scenario) for r, scenario in zip(rated.tolist(), scenarios, strict=True) if r < limit]
        scenarios = [scenario for _, scenario in found]
    for r, scenario in found:
        if not _is_legal(request, scenario.layout):
            continue
        fitting = scenario if fits(scenario, c) else with_segments(request, scenario, c)
        if fitting is not None:
            yield r, str(fitting.layout), fitting


def _is_legal(request: PlanRequest, layout: Layout) -> bool:
    """The layout breaks no rule of the grammar, of the model or of the batch."""
    facts = LayoutConstraints(
        world=layout.world, batch=request.batch, seq_len=request.seq_len, model=RuleFacts(request.shape)
    )
    return not find_violations(layout, facts)


def least_memory_plan(request: PlanRequest, c: Constants = FITTED_CONSTANTS) -> Plan | None:
    """Where nothing fits: the plan that needs the least memory."""
    # The least memory is where nothing that costs memory is chosen: small microbatches, full recomputation.
    lean: dict[str, int | str] = {"microbatch": 1, "recompute": "full", "schedule": "1f1b"}
    asked = replace(request, fixed={**lean, **request.fixed})
    scenarios = [request.scenario(layout) for layout in all_layouts(asked)] or [
        request.scenario(layout) for layout in all_layouts(request)
    ]
    if not scenarios:
        return None
    c = constants_for(scenarios[0], c)
    return price(min(scenarios, key=lambda scenario: (peak_memory(scenario, c).total, str(scenario.layout))), c)


def plan_objective(request: PlanRequest, plan: Plan) -> float:
    return float(objective_values(request, [plan.layout.world], np.array([plan.seconds]))[0])
