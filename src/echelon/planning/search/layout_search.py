"""The search: from a request to plans, best first, over every layout of the grammar that divides model and cluster.

[Note: an exhaustive search]

docs/planning.md ("How a layout is found") says why no layout of a closed branch can be among the best.

1. Branches are sorted by their lower bounds (bounds.py) and opened in that order, until enough layouts fit that are
   faster than the next bound.
2. In an open branch, layouts whose least states and activations exceed the memory are dropped. The others are timed by
   formula, and the memory of those that are fast enough is computed.
3. The best are priced again by simulating their schedules, and sorted.

every:N takes as long as recompute=full: so it needs no families. If nothing fits, the search uses the first kind of
offload with which something does, and tries the others on the best. The search is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from echelon.layout import Layout
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.count_work import count_stacked_work, count_work
from echelon.planning.cost.memory_model import fits, peak_memory
from echelon.planning.cost.step_time import step_times
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.bounds import BranchBound, branch_bounds, min_memory_bytes, objective_values
from echelon.planning.search.layout_families import all_layouts, branch_layouts
from echelon.planning.search.memory_variants import OFFLOAD_OPTIONS, memory_variants, with_segments

MIN_FINALISTS = 48
"""layouts that are simulated, at least: with uneven stages the formula is up to a tenth off"""
NUM_BUDGET_TRIALS = 12
"""layouts, of the best, that are tried with a budget"""
MIN_BUDGET_GAIN = 0.01
"""share by which a budget must beat the other recompute policies in the same layout"""
RatedScenario = tuple[float, str, Scenario]
"""(objective, the layout's text, the scenario)"""


def search_plans(request: PlanRequest, *, top: int = 10, c: Constants = FITTED_CONSTANTS) -> list[Plan]:
    """Find the best plans that fit, if any. See [Note: an exhaustive search]."""
    if len({group.device.name for group in request.cluster.node_groups}) > 1:
        return _search_mixed_cluster(request, top, c)
    plans = _search(request, request, top, c)
    offload = "" if plans else _offload_that_fits(request, c)
    if not offload:
        return plans
    return _search(request, replace(request, fixed={**request.fixed, "offload": offload}), top, c)


def _offload_that_fits(request: PlanRequest, c: Constants) -> str:
    """The first kind of offload with which something fits; empty if none does or the request fixes it."""
    least = None if "offload" in request.fixed else least_memory_plan(request, c)
    if least is None or not least.scenario.on_gpu:
        return ""
    for offload in OFFLOAD_OPTIONS:
        scenario = replace(least.scenario, layout=replace(least.scenario.layout, offload=offload))
        if scenario.is_compatible and _is_legal(request, scenario.layout) and fits(scenario, c):
            return offload
    return ""


def _search(request: PlanRequest, narrowed: PlanRequest, top: int, c: Constants) -> list[Plan]:
    """Search the layouts of a request with more keys fixed; try variants of these keys on the best."""
    c, num_finalists = constants_for(request.scenario(Layout()), c), max(MIN_FINALISTS, 2 * top)
    best: list[RatedScenario] = []
    for bound in branch_bounds(narrowed, c):
        if len(best) == num_finalists and bound.objective > best[-1][0]:
            break
        limit = best[-1][0] if len(best) == num_finalists else math.inf
        fitting = _fitting_scenarios(narrowed, bound, c, limit)
        best = sorted([*best, *fitting], key=lambda rated: rated[:2])[:num_finalists]
    plans = [price(scenario, c) for _, _, scenario in _refine(request, best, c, num_finalists)]
    plans.sort(key=lambda plan: (plan_objective(request, plan), str(plan.layout)))
    return plans[:top]


def _search_mixed_cluster(request: PlanRequest, top: int, c: Constants) -> list[Plan]:
    """Search a cluster of several device kinds: all of it, at the speed of its slowest, or one kind alone."""
    cluster = request.cluster
    kinds = {group.device.name: group.device for group in cluster.node_groups}
    slowest = cluster.with_devices(lambda _: cluster.device)
    alone = []
    for name, device in kinds.items():
        groups = tuple(group for group in cluster.node_groups if group.device.name == name)
        alone.append(replace(cluster, node_groups=groups, intra_node=device.intra_node, inter_node=device.inter_node))
    plans = [plan for some in (slowest, *alone) for plan in search_plans(replace(request, cluster=some), top=top, c=c)]
    return sorted(plans, key=lambda plan: (plan_objective(request, plan), str(plan.layout)))[:top]


def _refine(request: PlanRequest, best: list[RatedScenario], c: Constants, num_finalists: int) -> list[RatedScenario]:
    """Add variants of the best layouts; those of all layouts would be too many."""
    refined = {text: (objective, text, scenario) for objective, text, scenario in best}
    best_of_layout: dict[Layout, float] = {}
    for objective, _, scenario in reversed(best):
        best_of_layout[replace(scenario.layout, recompute="none")] = objective
    for rank, (_, _, scenario) in enumerate(best):
        limit = best_of_layout[replace(scenario.layout, recompute="none")]
        for variant in memory_variants(request, scenario, c, budget=rank < NUM_BUDGET_TRIALS):
            text = str(variant.layout)
            if text in refined or not _is_legal(request, variant.layout) or not fits(variant, c):
                continue
            seconds = np.array([step_times(count_work(variant), c).total])
            objective = float(objective_values(request, [variant.layout.world], seconds)[0])
            if objective < (1 - MIN_BUDGET_GAIN) * limit or "budget" not in text:
                refined[text] = (objective, text, variant)
    return sorted(refined.values(), key=lambda rated: rated[:2])[:num_finalists]


def _fitting_scenarios(request: PlanRequest, bound: BranchBound, c: Constants, limit: float) -> Iterator[RatedScenario]:
    """Yield the scenarios of a branch that fit and whose objective is below the limit."""
    branch, memory, activations = bound.branch, request.cluster.memory, bound.activation_bytes
    layouts = branch_layouts(request, branch)
    layouts = (layout for layout in layouts if min_memory_bytes(request, layout, activations) <= memory)
    scenarios = [request.scenario(layout) for layout in layouts]
    # Most are too slow before parameters and gradients are sent: those need not be counted.
    for include_per_step in (False, True):
        if not scenarios:
            return
        work = count_stacked_work(scenarios, include_per_step=include_per_step)
        seconds = np.asarray(step_times(work, c).total)
        objectives = objective_values(request, [branch.world] * len(scenarios), seconds).tolist()
        rated = [(value, one) for value, one in zip(objectives, scenarios, strict=True) if value < limit]
        scenarios = [scenario for _, scenario in rated]
    for objective, scenario in rated:
        if not _is_legal(request, scenario.layout):
            continue
        fitting = scenario if fits(scenario, c) else with_segments(request, scenario, c)
        if fitting is not None:
            yield objective, str(fitting.layout), fitting


def _is_legal(request: PlanRequest, layout: Layout) -> bool:
    """Whether the request admits the layout, and it obeys the rules of the grammar, of the model and of the batch."""
    return request.allows(layout) and not request.violations(layout, world=layout.world, batch=request.batch)


def least_memory_plan(request: PlanRequest, c: Constants = FITTED_CONSTANTS) -> Plan | None:
    """The plan that needs the least memory, for requests that nothing fits."""
    # Small microbatches and full recomputation need the least.
    lean: dict[str, int | str] = {"microbatch": 1, "recompute": "full", "schedule": "1f1b"}
    leanest = replace(request, fixed={**lean, **request.fixed})
    layouts = list(all_layouts(leanest)) or list(all_layouts(request))
    if not layouts:
        return None
    scenarios = [request.scenario(layout) for layout in layouts]
    c = constants_for(scenarios[0], c)
    return price(min(scenarios, key=lambda scenario: (peak_memory(scenario, c).total, str(scenario.layout))), c)


def plan_objective(request: PlanRequest, plan: Plan) -> float:
    return float(objective_values(request, [plan.layout.world], np.array([plan.seconds]))[0])
