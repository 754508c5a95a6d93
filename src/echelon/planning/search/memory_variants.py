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


def memory_variants(wish: PlanRequest, case: Scenario, c: Constants, *, budget: bool) -> Iterator[Scenario]:
    """The case in other ways, where nothing fixes what they change; whether they fit is not asked."""
    layout = case.layout
    # What `ops` makes again takes a hundredth of a step: a budget pays where whole layers are repeated.
    if budget and "recompute" not in wish.fixed and layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES:
        found = with_budget(case, c)
        if found is not None:
            yield found
    if layout.offload != "none" and "offload" not in wish.fixed:
        kinds = (layout.recompute,) if "recompute" in wish.fixed else RECOMPUTE_OPTIONS
        for away in OFFLOAD_OPTIONS:
            for kind in kinds:
                yield replace(case, layout=replace(layout, offload=away, recompute=kind))


def with_segments(wish: PlanRequest, case: Scenario, c: Constants) -> Scenario | None:
    """Layers that are repeated by themselves, in segments that fit, as short as can be; none where none do."""
    if case.layout.recompute != "full" or "recompute" in wish.fixed:
        return None
    layers = math.ceil(case.shape.num_layers / (case.layout.pp * case.layout.vpp))
    layer = max((layer for layer, _ in case.shape.layers), key=lambda one: saved_tensor_bytes(case, one))
    inside, kept = saved_tensor_bytes(case, layer) + score_bytes(case, layer), layer_input_bytes(case)
    # n layers at once keep 1 / n of the inputs, and have n insides there: the least is at the root of their ratio.
    best = min(layers, round(math.sqrt(layers_in_flight(case, 0) * kept / inside)))
    if best < 2:
        return None
    least = replace(case, layout=replace(case.layout, recompute=f"every:{best}"))
    if not fits(least, c):
        return None
    for length in range(2, best):
        found = replace(case, layout=replace(case.layout, recompute=f"every:{length}"))
        if fits(found, c):
            return found
    return least


def with_budget(case: Scenario, c: Constants) -> Scenario | None:
    """As much for activations as the memory has room for; the inside of a layer that is repeated is there already."""
    room = min(
        case.cluster.memory - memory.total + memory.parts.get("activations", 0)
        for memory in (stage_memory(case, stage, c) for stage in stages_to_check(case))
    )
    size = math.floor(10 * BUDGET_SHARE * room / GIB) / 10
    if size <= 0:
        return None
    return replace(case, layout=replace(case.layout, recompute=f"budget:{size:g}GiB"))
