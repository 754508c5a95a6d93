"""What no layout of a branch can do without: seconds and bytes. The search need not look where these are too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.layout import Layout
from echelon.planning.calibrate.constants import Constants
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.optimizer_update import updates_in_backward
from echelon.planning.cost.param_group_traffic import NUM_MOMENTS, gradient_bytes
from echelon.planning.cost.recompute_cost import FULL_LAYER_POLICIES, recompute_plan, saved_layer_bytes
from echelon.planning.cost.step_time import bubble_times, microbatch_time, recompute_time
from echelon.planning.cost.step_work import stack_work
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_families import MAX_VPP, LayoutBranch, LayoutFamily, layout_branches


@dataclass(frozen=True, order=True)
class BranchBound:
    objective: float
    """what the objective cannot be less than"""
    branch: LayoutBranch
    activation_bytes: float
    """bytes that some rank holds at least"""


def branch_bounds(request: PlanRequest, c: Constants) -> list[BranchBound]:
    """Of every branch whose states and activations can fit, best first."""
    found = layout_branches(request)
    scenarios = {family: request.scenario(_most_microbatches(request, family)) for family in found}
    all_layers = {family: _min_activation_bytes(request, scenario) for family, scenario in scenarios.items()}
    every = [
        (number, branch, all_layers[family] * min(1.0, branch.accumulate / branch.pp))
        for number, (family, some) in enumerate(found.items())
        for branch in some
    ]
    # States are divided by all devices at most, and gradients need not be there when all activations are.
    each = 0 if "offload" in request.fixed else request.master_bytes + NUM_MOMENTS * request.moment_bytes
    states = each * request.shape.parameters
    every = [one for one in every if states / one[1].world + one[2] <= request.cluster.memory]
    if not every:
        return []
    at = np.array([number for number, _, _ in every])
    pp, accumulate = (np.array([getattr(branch, key) for _, branch, _ in every]) for key in ("pp", "accumulate"))
    works = stack_work([count_work(scenario, include_per_step=False) for scenario in scenarios.values()])
    m = microbatch_time(works, c)
    sent = m.tp + m.ep + m.cp
    layers = m.forward + m.backward + recompute_time(works, m) + sent
    forward = m.forward + sent / (2 + works.microbatch.recompute.layers)
    bubble = 0.0
    if "schedule" not in request.fixed:
        passes = (np.asarray(part)[at] / pp for part in (forward, layers, m.weight_grad))
        bubble = np.min(np.array(bubble_times(pp, accumulate, MAX_VPP, *passes)), axis=0)
    seconds = accumulate * np.asarray(layers + 3 * m.head)[at] / pp + bubble
    rated = objective_values(request, [branch.world for _, branch, _ in every], seconds)
    return sorted(BranchBound(r, branch, size) for r, (_, branch, size) in zip(rated.tolist(), every, strict=True))


def _most_microbatches(request: PlanRequest, family: LayoutFamily) -> Layout:
    """With as many microbatches as a step can have: what is moved once a step is then least in a microbatch."""
    return family.layout(accumulate=request.batch // family.microbatch)


def _min_activation_bytes(request: PlanRequest, scenario: Scenario) -> float:
    """Bytes of all layers of a microbatch, which some rank of a pipeline holds at its fullest.

    The first of pp stages has pp microbatches in flight, each in 1 / pp of the layers, unless a step has too few
    microbatches to fill it; schedules there and back have as much on their last rank.
    """
    kind, schedule = scenario.layout.recompute.partition(":")[0], request.fixed.get("schedule", "")
    # How many layers a budget repeats, or a segment has, depends on the pipeline.
    if kind == "budget" or kind in FULL_LAYER_POLICIES[1:] or schedule in ("naive", "terapipe"):
        return 0.0
    if "activations" in str(request.fixed.get("offload", "")):
        return 0.0
    done = recompute_plan(scenario)
    return sum(n * saved_layer_bytes(scenario, layer, done) for layer, n in scenario.shape.layers)


def min_memory_bytes(request: PlanRequest, layout: Layout, activation_bytes: float) -> float:
    """That no rank of the layout can do without: its share of parameters, gradients and states, and activations."""
    shape, scenario = request.shape, request.scenario(layout)
    if layout.offload != "none":
        return 0.0 if "activations" in layout.offload else activation_bytes
    experts = sum(n * layer.expert_parameters for layer, n in shape.layers)
    layers = sum(n * layer.parameters for layer, n in shape.layers) - experts
    own = layers / (layout.tp * layout.pp)
    spread = experts / (layout.ep * layout.etp * layout.pp)
    data = layout.dp * layout.cp
    compute, gradient = scenario.element_bytes, gradient_bytes(scenario)
    beside = max(scenario.master_bytes - compute, 0) + NUM_MOMENTS * scenario.moment_bytes
    # Under zero 1 to 3: what is whole on a rank, and what is divided. Gradients are divided under 2 and 3.
    whole, divided = {0: (compute + beside, 0), 3: (0, compute + beside)}.get(layout.zero, (compute, beside))
    parts = ((own, data), (spread, max(1, data * layout.tp // (layout.ep * layout.etp))))
    states = sum(count * (whole + divided / ranks) for count, ranks in parts)
    of_gradients = sum(count * gradient / (ranks if layout.zero >= 2 else 1) for count, ranks in parts)
    if layout.accumulate * layout.pp == 1:  # all activations are there before all gradients are
        return states + max(activation_bytes, 0.0 if updates_in_backward(scenario) else of_gradients)
    return states + activation_bytes + of_gradients


def objective_values(request: PlanRequest, worlds: Sequence[int], seconds: np.ndarray) -> np.ndarray:
    """What the objective asks to be small, of layouts on so many devices."""
    devices = np.array(worlds)
    if request.objective == "devices":
        return np.asarray(devices * 1e6 + seconds)
    if request.objective == "time":
        return np.asarray(seconds)
    device = request.cluster.device
    return np.asarray(seconds * devices * (device.price / 3600 if request.objective == "cost" else device.watts))
