"""Variants of a layout that save memory in another way, which the search tries on the best layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from echelon.planning.calibrate.constants import Constants
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.activation_memory import layer_input_bytes, layers_in_flight, saved_tensor_bytes, score_bytes
from echelon.planning.cost.memory_model import fits, stage_memory, stages_to_check
from echelon.planning.scenario import PlanRequest, Scenario

OFFLOAD_OPTIONS = ("optimizer", "activations", "params", "optimizer+activations", "params+activations")
"""what a GPU may offload if nothing fits, in the order in which the search tries them"""
RECOMPUTE_OPTIONS = ("none", "ops", "full")
BUDGET_SHARE = 0.99
"""share of the free memory that a budget gets: bytes are rounded up"""


def memory_variants(request: PlanRequest, scenario: Scenario, c: Constants, *, budget: bool) -> Iterator[Scenario]:
    """Yield the scenario with other recomputation and offload that the request leaves open, whether they fit or not."""
    layout = scenario.layout
    # `ops` recomputes a hundredth of a step: a budget pays only in place of full layers.
    if budget and "recompute" not in request.fixed and scenario.recomputes_layers:
        budgeted = with_budget(scenario, c)
        if budgeted is not None:
            yield budgeted
    if layout.offload != "none" and "offload" not in request.fixed:
        policies = (layout.recompute,) if "recompute" in request.fixed else RECOMPUTE_OPTIONS
        for offload in OFFLOAD_OPTIONS:
            for recompute in policies:
                yield replace(scenario, layout=replace(layout, offload=offload, recompute=recompute))


def with_segments(request: PlanRequest, scenario: Scenario, c: Constants) -> Scenario | None:
    """Recompute several layers at once, the fewest that fit, in place of single ones; None if no number fits."""
    if scenario.layout.recompute != "full" or "recompute" in request.fixed:
        return None

    def in_segments(length: int) -> Scenario:
        return replace(scenario, layout=replace(scenario.layout, recompute=f"every:{length}"))

    layers = math.ceil(scenario.shape.num_layers / (scenario.layout.pp * scenario.layout.vpp))
    layer = max((layer for layer, _ in scenario.shape.layers), key=lambda one: saved_tensor_bytes(scenario, one))
    recomputed, saved = saved_tensor_bytes(scenario, layer) + score_bytes(scenario, layer), layer_input_bytes(scenario)
    # Segments of n layers save 1 / n of the inputs and recompute n layers: the optimum is the root of their ratio.
    best = min(layers, round(math.sqrt(layers_in_flight(scenario, 0) * saved / recomputed)))
    if best < 2 or not fits(in_segments(best), c):
        return None
    shorter = (in_segments(length) for length in range(2, best))
    return next((found for found in shorter if fits(found, c)), in_segments(best))


def with_budget(scenario: Scenario, c: Constants) -> Scenario | None:
    """Recompute with a budget of all free memory; None if there is none.

    The memory to recompute a layer in is counted already.
    """
    free = min(
        scenario.cluster.memory - memory.total + memory.parts.get("activations", 0)
        for memory in (stage_memory(scenario, stage, c) for stage in stages_to_check(scenario))
    )
    size = math.floor(10 * BUDGET_SHARE * free / GIB) / 10
    if size <= 0:
        return None
    return replace(scenario, layout=replace(scenario.layout, recompute=f"budget:{size:g}GiB"))
