"""What a layout's recomputation does: which form each layer has, what is made again for that, and what is sent again.

[Note: a budget]

A run counts its layers with the first microbatch, and solves for the forms that fit and take the least time
(memory/checkpointing/memory_budget.py). A plan counts them by its own formulas and asks the same solver (memory/checkpointing/knapsack.py) with the same
speeds: for the first stage of a pipeline, which has the most in flight. Other stages have room to repeat less, and wait
for that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.memory.checkpointing.checkpoint_options import LayerMeasurement, checkpoint_options
from echelon.memory.checkpointing.cost import GIB, RecomputedLayers, segment_length
from echelon.memory.checkpointing.knapsack import CheckpointOption, solve_knapsack
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.planning.cost.activation_memory import (
    dropout_mask_bytes,
    layer_input_bytes,
    layers_in_flight,
    saved_bytes,
    saved_input_bytes,
    saved_tensor_bytes,
    score_bytes,
)
from echelon.planning.cost.elementwise_traffic import elementwise_traffic
from echelon.planning.cost.step_work import RecomputeShares
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

FULL_LAYER_POLICIES = ("full", "every", "sqrt")
"""kinds whose layers are repeated whole"""


@dataclass(frozen=True)
class RecomputePlan:
    """What the layers do."""

    forms: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """shares of the layers that have each form (activations.py)"""
    segment_layers: int = 1
    """of those that are repeated, how many at once"""

    def share(self, name: str) -> float:
        return sum(share for form, share in self.forms if name in form)

    @property
    def full_share(self) -> float:
        return self.share("full")


def recompute_plan(scenario: Scenario) -> RecomputePlan:
    kind = scenario.layout.recompute.partition(":")[0]
    if kind == "none":
        return RecomputePlan()
    if kind == "budget":
        return _solve_budget(scenario)
    if kind not in FULL_LAYER_POLICIES:
        return RecomputePlan(((kind, 1.0),))
    layers = _layers_per_chunk(scenario)
    flights = layers_in_flight(scenario, 0) / layers
    return RecomputePlan((("full", 1.0),), segment_length(scenario.layout.recompute, layers=layers, in_flight=flights))


def _layers_per_chunk(scenario: Scenario) -> int:
    stages = scenario.layout.pp * scenario.layout.vpp
    return -(-scenario.shape.num_layers // stages)


def saved_layer_bytes(scenario: Scenario, layer: LayerShape, recompute: RecomputePlan) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    return sum(
        share
        * (
            saved_input_bytes(scenario) / recompute.segment_layers
            if form == "full"
            else saved_bytes(scenario, layer, form)
        )
        for form, share in recompute.forms
    )


def recomputed_bytes(scenario: Scenario, layer: LayerShape, recompute: RecomputePlan) -> float:
    """Bytes that are there while layers go backward that did not keep them: all of a segment, or attention's core."""
    if recompute.full_share:
        counted = scenario.has_kernels or scenario.is_unfused
        own = (
            layer_input_bytes(scenario) if counted and not copies_input(scenario) else 0.0
        )  # its input is kept already
        return recompute.segment_layers * (saved_tensor_bytes(scenario, layer) + score_bytes(scenario, layer)) - own
    if recompute.share("selective"):
        return (
            saved_tensor_bytes(scenario, layer)
            - saved_tensor_bytes(scenario, layer, "selective")
            + score_bytes(scenario, layer)
        )
    return 0.0


def copies_input(scenario: Scenario) -> bool:
    """A layer's input is made of what is kept, in memory of its own."""
    return saved_input_bytes(scenario) != layer_input_bytes(scenario) or scenario.memory_options.arena


def compression_traffic(scenario: Scenario) -> float:
    """Bytes that a microbatch moves to keep activations in fewer bits, or in an arena, and to have them back."""
    thrift, size = scenario.memory_options, scenario.element_bytes
    if not thrift.compresses and not thrift.arena:
        return 0.0
    done, total = recompute_plan(scenario), 0.0
    for layer, n in scenario.shape.layers:
        for form, share in done.forms:
            if form == "full":
                kept_here, flags = layer_input_bytes(scenario) / done.segment_layers, 0.0
                total += n * share * (4 * kept_here if thrift.arena else 0.0)
            else:
                flags = dropout_mask_bytes(scenario, layer, form)
                kept_here = (
                    saved_tensor_bytes(scenario, layer, form)
                    + (0.0 if "selective" in form else score_bytes(scenario, layer))
                    - flags
                )
            total += n * share * thrift.compression_traffic(kept_here, flags, size)
    return total


# -- what is repeated -------------------------------------------------------------------------------------------------


def recompute_shares(scenario: Scenario) -> RecomputeShares:
    experts = scenario.expert_load > MAX_LOAD_FACTOR  # chunked dispatch saves nothing
    if scenario.layout.recompute == "none":
        return RecomputeShares(experts=experts)
    done = recompute_plan(scenario)
    some, core = done.share("ops"), done.share("selective")
    own = scenario.has_kernels or scenario.is_unfused
    passing = some * elementwise_traffic(scenario, recompute_ops=True).recompute_ratio if some else 0.0
    if core:
        passing += core * (elementwise_traffic(scenario).core_recompute_ratio if own else 0.5)
    # A repetition ends with the probabilities: what they make of the values is kept.
    attention = core * (0.5 if own and scenario.materializes_scores else 1.0)
    return RecomputeShares(layers=done.full_share, attention=attention, elementwise=passing, experts=experts)


def recomputed_layers(scenario: Scenario) -> RecomputedLayers:
    """Layers that are repeated, for counting messages; of a budget, as many as come of it."""
    shape, done = scenario.shape, recompute_plan(scenario)
    if scenario.layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES:
        return RecomputedLayers.from_policy(
            f"every:{done.segment_layers}", layers=shape.num_layers, moe_layers=shape.num_moe_layers
        )
    whole, mixed = round(done.full_share * shape.num_layers), round(done.full_share * shape.num_moe_layers)
    cores = round(done.share("selective") * shape.num_layers)
    return RecomputedLayers(
        dense=whole - mixed, dense_tails=whole - mixed, moe=mixed, moe_tails=mixed, attention_cores=cores
    )


# -- a budget ---------------------------------------------------------------------------------------------------------


def _solve_budget(scenario: Scenario) -> RecomputePlan:
    """See [Note: a budget]. Where it is less than `full` takes, every layer is repeated: a run refuses that."""
    kinds = tuple(tuple(layer_checkpoint_options(scenario, layer)) for layer, _ in scenario.shape.layers)
    counts = tuple(n for _, n in scenario.shape.layers)
    layers = _layers_per_chunk(scenario)
    flights = max(1, round(layers_in_flight(scenario, 0) / layers))
    budget = float(scenario.layout.recompute.partition(":")[2].removesuffix("GiB")) * GIB
    return _solve_forms(kinds, counts, layers, flights, budget)


@lru_cache(maxsize=512)
def _solve_forms(
    options: tuple[tuple[CheckpointOption, ...], ...], counts: tuple[int, ...], layers: int, flights: int, budget: float
) -> RecomputePlan:
    total = sum(counts)
    stage = [ways for ways, n in zip(options, counts, strict=True) for _ in range(max(1, round(n * layers / total)))]
    found = solve_knapsack(stage, [flights] * len(stage), budget)
    chosen = [way.form for way in found] if found is not None else ["full"] * len(stage)
    return RecomputePlan(tuple((form, chosen.count(form) / len(chosen)) for form in sorted(set(chosen))))


def layer_checkpoint_options(scenario: Scenario, layer: LayerShape) -> list[CheckpointOption]:
    """What a layer can do, as a run would count it."""
    found = {"none": _checkpoint_counts(scenario, layer, "none")}
    if not (scenario.memory_options.compresses and scenario.layout.recompute == "ops"):
        found["ops"] = _checkpoint_counts(scenario, layer, "ops")
    if layer.attention is not None:
        found["selective"] = _checkpoint_counts(scenario, layer, "selective")
        found["ops+selective"] = _checkpoint_counts(scenario, layer, "ops+selective")
    return checkpoint_options(found, "cuda" if scenario.on_gpu else "cpu", copies_input=copies_input(scenario))


def _checkpoint_counts(scenario: Scenario, layer: LayerShape, form: str) -> LayerMeasurement:
    none = saved_tensor_bytes(scenario, layer) + score_bytes(scenario, layer)
    selective = saved_tensor_bytes(scenario, layer, "selective")
    flops = layer.flops(scenario.seq_len) * scenario.tokens / scenario.layout.tp
    core = layer.attention.flops(scenario.seq_len) * scenario.tokens / scenario.layout.tp if layer.attention else 0.0
    return LayerMeasurement(
        saved_bytes=saved_bytes(scenario, layer, form),
        core_bytes=none - selective,
        saved_and_input_bytes=saved_bytes(scenario, layer, form),  # what `ops` makes again is used at once
        input_bytes=saved_input_bytes(scenario),
        flops=flops,
        recompute_flops=flops,
        core_flops=core,
        core_recompute_flops=core / 2 if scenario.materializes_scores else core,
    )
