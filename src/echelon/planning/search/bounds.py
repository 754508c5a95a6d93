"""Lower bounds on time and memory of all layouts of a branch: the search skips branches whose bounds are too high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.layout import Layout
from echelon.pipeline.schedules.bubble_time import bubble_times
from echelon.planning.calibrate.constants import Constants
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.optimizer_update import updates_in_backward
from echelon.planning.cost.param_group_traffic import EXPERT_GROUP, data_parallel_ranks, group_state_bytes, param_group
from echelon.planning.cost.recompute_cost import microbatch_saved_bytes
from echelon.planning.cost.step_time import microbatch_time, recompute_time
from echelon.planning.cost.step_work import stack_work
from echelon.planning.scenario import FULL_LAYER_POLICIES, NUM_MOMENTS, PlanRequest, Scenario
from echelon.planning.search.layout_families import MAX_VPP, LayoutBranch, layout_branches


@dataclass(frozen=True, order=True)
class BranchBound:
    """A branch with the least that its layouts take."""

    objective: float
    branch: LayoutBranch
    activation_bytes: float
    """on some rank"""


def branch_bounds(request: PlanRequest, c: Constants) -> list[BranchBound]:
    """Bound every branch whose states and activations can fit, best first."""
    branches = layout_branches(request)
    # The layout with the most microbatches, among which the work of a step is spread thinnest.
    longest = (Layout(**vars(family), accumulate=request.batch // family.microbatch) for family in branches)
    scenarios = {family: request.scenario(layout) for family, layout in zip(branches, longest, strict=True)}
    layer_bytes = {family: _min_activation_bytes(request, scenario) for family, scenario in scenarios.items()}
    candidates = [
        (index, branch, layer_bytes[family] * min(1.0, branch.accumulate / branch.pp))
        for index, (family, some) in enumerate(branches.items())
        for branch in some
    ]
    # All devices shard states at most, and gradients need not be allocated when all activations are.
    bytes_per_param = 0 if "offload" in request.fixed else request.master_bytes + NUM_MOMENTS * request.moment_bytes
    states = bytes_per_param * request.shape.parameters
    candidates = [one for one in candidates if states / one[1].world + one[2] <= request.cluster.memory]
    if not candidates:
        return []
    families = np.array([index for index, _, _ in candidates])
    pp, accumulate = (np.array([getattr(branch, key) for _, branch, _ in candidates]) for key in ("pp", "accumulate"))
    work = stack_work([count_work(scenario, include_per_step=False) for scenario in scenarios.values()])
    m = microbatch_time(work, c)
    layers = m.forward + m.backward + recompute_time(work, m) + m.communication
    forward = m.forward + m.communication / (2 + work.microbatch.recompute.layers)
    bubble = 0.0
    if "schedule" not in request.fixed:
        passes = (np.asarray(seconds)[families] / pp for seconds in (forward, layers, m.weight_grad))
        bubble = np.min(np.array(bubble_times(pp, accumulate, MAX_VPP, *passes)), axis=0)
    seconds = accumulate * np.asarray(layers + m.all_head)[families] / pp + bubble
    objectives = objective_values(request, [branch.world for _, branch, _ in candidates], seconds)
    rated = zip(objectives.tolist(), candidates, strict=True)
    return sorted(BranchBound(objective, branch, size) for objective, (_, branch, size) in rated)


def _min_activation_bytes(request: PlanRequest, scenario: Scenario) -> float:
    """Bytes of all layers of a microbatch, which some rank of a pipeline holds at its peak.

    The first of pp stages has pp microbatches in flight, each in 1 / pp of the layers, unless a step has too few
    microbatches to fill it; V-shaped schedules have as much on their last rank.
    """
    policy, schedule = scenario.layout.recompute.partition(":")[0], request.fixed.get("schedule", "")
    # How many layers a budget recomputes, or a segment has, depends on the pipeline.
    if policy == "budget" or policy in FULL_LAYER_POLICIES[1:] or schedule in ("naive", "terapipe"):
        return 0.0
    if "activations" in str(request.fixed.get("offload", "")):
        return 0.0
    return microbatch_saved_bytes(scenario)


def min_memory_bytes(request: PlanRequest, layout: Layout, activation_bytes: float) -> float:
    """Bytes that some rank needs at least: its share of the layers' states and gradients, and activations."""
    if layout.offload != "none":
        return 0.0 if "activations" in layout.offload else activation_bytes
    scenario = request.scenario(layout)
    states = _layer_state_bytes(scenario)
    gradients = states.pop("gradients")
    if layout.accumulate * layout.pp == 1:  # all activations are saved before all gradients are allocated
        return sum(states.values()) + max(activation_bytes, 0 if updates_in_backward(scenario) else gradients)
    return sum(states.values()) + activation_bytes + gradients


def _layer_state_bytes(scenario: Scenario) -> dict[str, int]:
    """Bytes of the layers' states and gradients by category, if stages are even and all data ranks shard them."""
    layout, layers = scenario.layout, scenario.shape.layers
    experts = sum(n * layer.expert_parameters for layer, n in layers)
    numels = {"layers": (sum(n * layer.parameters for layer, n in layers) - experts) // (layout.tp * layout.pp)}
    if experts:
        numels[EXPERT_GROUP] = experts // (layout.ep * layout.etp * layout.pp)
    total: dict[str, int] = {}
    for name, numel in numels.items():
        num_shards = data_parallel_ranks(scenario, name) if layout.zero else 1
        for category, size in group_state_bytes(scenario, param_group(name, numel, num_shards)).items():
            total[category] = total.get(category, 0) + size
    return total


def objective_values(request: PlanRequest, worlds: Sequence[int], seconds: np.ndarray) -> np.ndarray:
    """What the request minimizes, of layouts on `worlds` devices."""
    devices = np.array(worlds)
    if request.objective == "devices":
        return np.asarray(devices * 1e6 + seconds)
    if request.objective == "time":
        return np.asarray(seconds)
    device = request.cluster.device
    return np.asarray(seconds * devices * (device.price / 3600 if request.objective == "cost" else device.watts))
