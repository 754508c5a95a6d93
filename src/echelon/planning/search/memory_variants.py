"""A layout with another way to save memory: what the search tries beside the families of layouts (search.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from echelon.planning.calibrate.constants import Constants
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.activation_memory import layer_input_bytes, layers_in_flight, saved_tensor_bytes, score_bytes
from echelon.planning.cost.memory_model import fits, stage_memory, stages_to_check
from echelon.planning.cost.recompute_cost import FULL_LAYER_POLICIES
from echelon.planning.scenario import PlanRequest, Scenario

OFFLOAD_OPTIONS = ("optimizer", "activations", "params", "optimizer+activations", "params+activations")
"""what may leave a GPU where nothing fits, in the order in which the search looks for a kind that makes room"""
RECOMPUTE_OPTIONS = ("none", "ops", "full")
BUDGET_SHARE = 0.99
"""share of the room that is given to a budget: bytes are rounded up"""


def memory_variants(request: PlanRequest, scenario: Scenario, c: Constants, *, budget: bool) -> Iterator[Scenario]:
    """The scenario in other ways, where nothing fixes what they change; whether they fit is not asked."""
    layout = scenario.layout
    # What `ops` makes again takes a hundredth of a step: a budget pays where whole layers are repeated.
    if budget and "recompute" not in request.fixed and layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES:
        found = with_budget(scenario, c)
        if found is not None:
            yield found
    if layout.offload != "none" and "offload" not in request.fixed:
        kinds = (layout.recompute,) if "recompute" in request.fixed else RECOMPUTE_OPTIONS
        for away in OFFLOAD_OPTIONS:
            for kind in kinds:
                yield replace(scenario, layout=replace(layout, offload=away, recompute=kind))


def with_segments(request: PlanRequest, scenario: Scenario, c: Constants) -> Scenario | None:
    """Layers that are repeated by themselves, in segments that fit, as short as can be; none where none do."""
    if scenario.layout.recompute != "full" or "recompute" in request.fixed:
        return None
    layers = math.ceil(scenario.shape.num_layers / (scenario.layout.pp * scenario.layout.vpp))
    layer = max((layer for layer, _ in scenario.shape.layers), key=lambda one: saved_tensor_bytes(scenario, one))
    inside, kept = saved_tensor_bytes(scenario, layer) + score_bytes(scenario, layer), layer_input_bytes(scenario)
    # n layers at once keep 1 / n of the inputs, and have n insides there: the least is at the root of their ratio.
    best = min(layers, round(math.sqrt(layers_in_flight(scenario, 0) * kept / inside)))
    if best < 2:
        return None
    least = replace(scenario, layout=replace(scenario.layout, recompute=f"every:{best}"))
    if not fits(least, c):
        return None
    for length in range(2, best):
        found = replace(scenario, layout=replace(scenario.layout, recompute=f"every:{length}"))
        if fits(found, c):
            return found
    return least


def with_budget(scenario: Scenario, c: Constants) -> Scenario | None:
    """As much for activations as the memory has room for; the inside of a layer that is repeated is there already."""
    room = min(
        scenario.cluster.memory - memory.total + memory.parts.get("activations", 0)
        for memory in (stage_memory(scenario, stage, c) for stage in stages_to_check(scenario))
    )
    size = math.floor(10 * BUDGET_SHARE * room / GIB) / 10
    if size <= 0:
        return None
    return replace(scenario, layout=replace(scenario.layout, recompute=f"budget:{size:g}GiB"))
