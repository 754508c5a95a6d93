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


def recompute_plan(case: Scenario) -> RecomputePlan:
    kind = case.layout.recompute.partition(":")[0]
    if kind == "none":
        return RecomputePlan()
    if kind == "budget":
        return _solve_budget(case)
    if kind not in FULL_LAYER_POLICIES:
        return RecomputePlan(((kind, 1.0),))
    layers = _layers_per_chunk(case)
    flights = layers_in_flight(case, 0) / layers
    return RecomputePlan((("full", 1.0),), segment_length(case.layout.recompute, layers=layers, in_flight=flights))


def _layers_per_chunk(case: Scenario) -> int:
    stages = case.layout.pp * case.layout.vpp
    return -(-case.shape.num_layers // stages)


def saved_layer_bytes(case: Scenario, layer: LayerShape, recompute: RecomputePlan) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    return sum(
        share
        * (saved_input_bytes(case) / recompute.segment_layers if form == "full" else saved_bytes(case, layer, form))
        for form, share in recompute.forms
    )


def recomputed_bytes(case: Scenario, layer: LayerShape, recompute: RecomputePlan) -> float:
    """Bytes that are there while layers go backward that did not keep them: all of a segment, or attention's core."""
    if recompute.full_share:
        counted = case.has_kernels or case.is_unfused
        own = layer_input_bytes(case) if counted and not copies_input(case) else 0.0  # its input is kept already
        return recompute.segment_layers * (saved_tensor_bytes(case, layer) + score_bytes(case, layer)) - own
    if recompute.share("selective"):
        return saved_tensor_bytes(case, layer) - saved_tensor_bytes(case, layer, "selective") + score_bytes(case, layer)
    return 0.0


def copies_input(case: Scenario) -> bool:
    """A layer's input is made of what is kept, in memory of its own."""
    return saved_input_bytes(case) != layer_input_bytes(case) or case.memory_options.arena


def compression_traffic(case: Scenario) -> float:
    """Bytes that a microbatch moves to keep activations in fewer bits, or in an arena, and to have them back."""
    thrift, size = case.memory_options, case.element_bytes
    if not thrift.compresses and not thrift.arena:
        return 0.0
    done, total = recompute_plan(case), 0.0
    for layer, n in case.shape.layers:
        for form, share in done.forms:
            if form == "full":
                kept_here, flags = layer_input_bytes(case) / done.segment_layers, 0.0
                total += n * share * (4 * kept_here if thrift.arena else 0.0)
            else:
                flags = dropout_mask_bytes(case, layer, form)
                kept_here = (
                    saved_tensor_bytes(case, layer, form)
                    + (0.0 if "selective" in form else score_bytes(case, layer))
                    - flags
                )
            total += n * share * thrift.compression_traffic(kept_here, flags, size)
    return total


# -- what is repeated -------------------------------------------------------------------------------------------------


def recompute_shares(case: Scenario) -> RecomputeShares:
    experts = case.expert_load > MAX_LOAD_FACTOR  # chunked dispatch saves nothing
    if case.layout.recompute == "none":
        return RecomputeShares(experts=experts)
    done = recompute_plan(case)
    some, core = done.share("ops"), done.share("selective")
    own = case.has_kernels or case.is_unfused
    passing = some * elementwise_traffic(case, recompute_ops=True).recompute_ratio if some else 0.0
    if core:
        passing += core * (elementwise_traffic(case).core_recompute_ratio if own else 0.5)
    # A repetition ends with the probabilities: what they make of the values is kept.
    attention = core * (0.5 if own and case.materializes_scores else 1.0)
    return RecomputeShares(layers=done.full_share, attention=attention, elementwise=passing, experts=experts)


def recomputed_layers(case: Scenario) -> RecomputedLayers:
    """Layers that are repeated, for counting messages; of a budget, as many as come of it."""
    shape, done = case.shape, recompute_plan(case)
    if case.layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES:
        return RecomputedLayers.from_policy(
            f"every:{done.segment_layers}", layers=shape.num_layers, moe_layers=shape.num_moe_layers
        )
    whole, mixed = round(done.full_share * shape.num_layers), round(done.full_share * shape.num_moe_layers)
    cores = round(done.share("selective") * shape.num_layers)
    return RecomputedLayers(
        dense=whole - mixed, dense_tails=whole - mixed, moe=mixed, moe_tails=mixed, attention_cores=cores
    )


# -- a budget ---------------------------------------------------------------------------------------------------------


def _solve_budget(case: Scenario) -> RecomputePlan:
    """See [Note: a budget]. Where it is less than `full` takes, every layer is repeated: a run refuses that."""
    kinds = tuple(tuple(layer_checkpoint_options(case, layer)) for layer, _ in case.shape.layers)
    counts = tuple(n for _, n in case.shape.layers)
    layers = _layers_per_chunk(case)
    flights = max(1, round(layers_in_flight(case, 0) / layers))
    budget = float(case.layout.recompute.partition(":")[2].removesuffix("GiB")) * GIB
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


def layer_checkpoint_options(case: Scenario, layer: LayerShape) -> list[CheckpointOption]:
    """What a layer can do, as a run would count it."""
    found = {"none": _checkpoint_counts(case, layer, "none")}
    if not (case.memory_options.compresses and case.layout.recompute == "ops"):
        found["ops"] = _checkpoint_counts(case, layer, "ops")
    if layer.attention is not None:
        found["selective"] = _checkpoint_counts(case, layer, "selective")
        found["ops+selective"] = _checkpoint_counts(case, layer, "ops+selective")
    return checkpoint_options(found, "cuda" if case.on_gpu else "cpu", copies_input=copies_input(case))


def _checkpoint_counts(case: Scenario, layer: LayerShape, form: str) -> LayerMeasurement:
    none = saved_tensor_bytes(case, layer) + score_bytes(case, layer)
    selective = saved_tensor_bytes(case, layer, "selective")
    flops = layer.flops(case.seq_len) * case.tokens / case.layout.tp
    core = layer.attention.flops(case.seq_len) * case.tokens / case.layout.tp if layer.attention else 0.0
    return LayerMeasurement(
        saved_bytes=saved_bytes(case, layer, form),
        core_bytes=none - selective,
        saved_and_input_bytes=saved_bytes(case, layer, form),  # what `ops` makes again is used at once
        input_bytes=saved_input_bytes(case),
        flops=flops,
        recompute_flops=flops,
        core_flops=core,
        core_recompute_flops=core / 2 if case.materializes_scores else core,
    )
