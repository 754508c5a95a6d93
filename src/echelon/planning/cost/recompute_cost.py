"""Recomputation of a layout: the form of each layer, and the bytes, compute and collectives that follow.

[Note: a budget]

A run measures its layers with the first microbatch and solves for the forms that fit and take the least time
(memory/checkpointing/memory_budget.py). A plan counts them by its formulas and asks the same solver (knapsack.py) with
the same speeds, for the first stage of a pipeline, which has the most in flight. The other stages could recompute less,
but would wait for that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from echelon.layout.validation_error import ValidationIssue
from echelon.memory.checkpointing.checkpoint_options import LayerMeasurement, checkpoint_options
from echelon.memory.checkpointing.cost import GIB, RecomputedLayers, budget_bytes, segment_length, sufficient_budget
from echelon.memory.checkpointing.knapsack import CheckpointOption, peak_bytes, solve_knapsack
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.planning.calibrate.programs import STOPS_EARLY
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
from echelon.planning.cost.program_memory import PER_OPERATOR_PROGRAMS, last_gemm_share, recomputed_gemm_share
from echelon.planning.cost.step_work import RecomputeShares
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import FULL_LAYER_POLICIES, Scenario

BUDGET_SLACK = 0.97
"""share of the predicted smallest budget that is not refused: the prediction may exceed the measurement a little"""
AllOptions = tuple[tuple[tuple[CheckpointOption, ...], int], ...]
"""the options of every kind of layer, with the number of such layers"""


@dataclass(frozen=True)
class RecomputePlan:
    """The recompute forms of a rank's layers."""

    forms: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """each form (activation_memory.py) with its share of the layers"""
    segment_layers: int = 1
    """layers that `full` recomputes at once"""

    def share(self, name: str) -> float:
        """Share of the layers whose form includes `name`."""
        return sum(share for form, share in self.forms if name in form)

    @property
    def full_share(self) -> float:
        return self.share("full")


def recompute_plan(scenario: Scenario) -> RecomputePlan:
    policy = scenario.layout.recompute.partition(":")[0]
    if policy == "none":
        return RecomputePlan()
    if policy == "budget":
        return _solve_budget(scenario)
    if policy not in FULL_LAYER_POLICIES:
        return RecomputePlan(((policy, 1.0),))
    layers = _layers_per_chunk(scenario)
    in_flight = layers_in_flight(scenario, 0) / layers
    segment_layers = segment_length(scenario.layout.recompute, layers=layers, in_flight=in_flight)
    return RecomputePlan((("full", 1.0),), segment_layers)


def _layers_per_chunk(scenario: Scenario) -> int:
    return -(-scenario.shape.num_layers // (scenario.layout.pp * scenario.layout.vpp))


def saved_layer_bytes(scenario: Scenario, layer: LayerShape, recompute: RecomputePlan) -> float:
    """Bytes that one layer saves of one microbatch, on average over the forms."""
    total = 0.0
    for form, share in recompute.forms:
        segment_layers = recompute.segment_layers if form == "full" else 1
        total += share * (saved_bytes(scenario, layer, form) / segment_layers)
    return total


def microbatch_saved_bytes(scenario: Scenario) -> float:
    """Bytes that all layers save of one microbatch."""
    recompute = recompute_plan(scenario)
    return sum(n * saved_layer_bytes(scenario, layer, recompute) for layer, n in scenario.shape.layers)


def recomputed_bytes(scenario: Scenario, layer: LayerShape, recompute: RecomputePlan) -> float:
    """Bytes that backward recomputes before it frees them: of a segment, or of the attention core."""
    if recompute.full_share:
        full = saved_tensor_bytes(scenario, layer) + score_bytes(scenario, layer)
        # The segment's input is saved already.
        has_input = scenario.has_layer_counts and not copies_input(scenario)
        return recompute.segment_layers * full - (layer_input_bytes(scenario) if has_input else 0.0)
    if recompute.share("selective"):
        core = saved_tensor_bytes(scenario, layer) - saved_tensor_bytes(scenario, layer, "selective")
        return core + score_bytes(scenario, layer)
    return 0.0


def copies_input(scenario: Scenario) -> bool:
    """Whether recomputation starts from a copy of the saved input."""
    return saved_input_bytes(scenario) != layer_input_bytes(scenario) or scenario.memory_options.arena


def compression_traffic(scenario: Scenario) -> float:
    """Bytes that a microbatch moves to compress saved activations, or to copy them to an arena, and back."""
    options, recompute, total = scenario.memory_options, recompute_plan(scenario), 0.0
    if not options.compresses and not options.arena:
        return 0.0
    for layer, n in scenario.shape.layers:
        for form, share in recompute.forms:
            if form == "full":
                values, masks = layer_input_bytes(scenario) / recompute.segment_layers, 0.0
                total += n * share * (4 * values if options.arena else 0.0)
            else:
                masks = dropout_mask_bytes(scenario, layer, form)
                scores = 0.0 if "selective" in form else score_bytes(scenario, layer)
                values = saved_tensor_bytes(scenario, layer, form) + scores - masks
            total += n * share * options.compression_traffic(values, masks, scenario.element_bytes)
    return total


def recompute_shares(scenario: Scenario) -> RecomputeShares:
    experts = scenario.expert_load > MAX_LOAD_FACTOR  # chunked dispatch saves nothing
    if scenario.layout.recompute == "none":
        return RecomputeShares(experts=experts)
    recompute, counted = recompute_plan(scenario), scenario.has_layer_counts
    if scenario.program in PER_OPERATOR_PROGRAMS and scenario.layout.recompute == "selective":
        return RecomputeShares(gemms=_gemm_share(scenario, recomputed_gemm_share), elementwise=1.0, experts=experts)
    # torch's checkpointing stops once backward has what it reads: the last GEMM of a layer is not recomputed.
    skipped = _gemm_share(scenario, last_gemm_share) if scenario.program in STOPS_EARLY else 0.0
    ops, core = recompute.share("ops"), recompute.share("selective")
    elementwise = ops * elementwise_traffic(scenario, recompute_ops=True).recompute_ratio if ops else 0.0
    if core:
        elementwise += core * (elementwise_traffic(scenario).core_recompute_ratio if counted else 0.5)
    # Recomputing materialized attention ends with the probabilities: their product with the values is saved.
    attention = core * (0.5 if counted and scenario.materializes_scores else 1.0)
    return RecomputeShares(
        layers=recompute.full_share,
        attention=attention,
        elementwise=elementwise,
        gemms=-recompute.full_share * skipped,
        experts=experts,
    )


def _gemm_share(scenario: Scenario, layer_share: Callable[[LayerShape], float]) -> float:
    """Share of the FLOPs of all layers' GEMMs, from that of each layer."""
    flops = [n * sum(matmul.flops for matmul in layer.matmuls) for layer, n in scenario.shape.layers]
    shares = [layer_share(layer) for layer, _ in scenario.shape.layers]
    return sum(share * count for share, count in zip(shares, flops, strict=True)) / max(1.0, sum(flops))


def recomputed_layers(scenario: Scenario) -> RecomputedLayers:
    """Count the layers that backward recomputes, and whose collectives it repeats."""
    shape, recompute = scenario.shape, recompute_plan(scenario)
    if scenario.recomputes_layers:
        policy = f"every:{recompute.segment_layers}"
        return RecomputedLayers.from_policy(policy, layers=shape.num_layers, moe_layers=shape.num_moe_layers)
    full, moe = (round(recompute.full_share * count) for count in (shape.num_layers, shape.num_moe_layers))
    dense, cores = full - moe, round(recompute.share("selective") * shape.num_layers)
    return RecomputedLayers(dense=dense, dense_tails=dense, moe=moe, moe_tails=moe, attention_cores=cores)


def _solve_budget(scenario: Scenario) -> RecomputePlan:
    """Solve for the forms: see [Note: a budget]. If `full` exceeds it, all layers are `full`, which a run refuses."""
    options, layers, in_flight = _budget_problem(scenario)
    return _solve_forms(options, layers, in_flight, budget_bytes(scenario.layout.recompute))


def _budget_problem(scenario: Scenario) -> tuple[AllOptions, int, int]:
    """Return the options of every kind of layer, the layers of a chunk, and the microbatches of them in flight."""
    options = tuple((tuple(layer_checkpoint_options(scenario, layer)), n) for layer, n in scenario.shape.layers)
    layers = _layers_per_chunk(scenario)
    return options, layers, max(1, round(layers_in_flight(scenario, 0) / layers))


def smallest_budget(scenario: Scenario) -> float:
    """Return the bytes of the smallest budget: every layer is recomputed."""
    options, layers, in_flight = _budget_problem(scenario)
    stage = [some[-1] for some in _stage_options(options, layers)]
    return peak_bytes(stage, [in_flight] * len(stage))


def budget_issues(scenario: Scenario, *, element_scale: float = 1.0) -> list[ValidationIssue]:
    """Return the issue of a budget that cannot hold what remains if every layer is recomputed.

    A run measures its layers and decides to the byte: what this refuses, it would refuse after ranks have started.
    `element_scale` multiplies the bytes, for a dtype that is not priced (float64).
    """
    recompute = scenario.layout.recompute
    if not recompute.startswith("budget:"):
        return []
    minimum = element_scale * smallest_budget(scenario)
    if budget_bytes(recompute) >= BUDGET_SLACK * minimum:
        return []
    needed = f"{minimum / GIB:.4g} GiB for the inputs of the layers and the activations of one"
    message = f"is too small to recompute every layer ({needed})"
    legal = f"{sufficient_budget(minimum)} or more, or a smaller microbatch"
    return [ValidationIssue(key="recompute", value=recompute, message=message, legal=legal)]


def _stage_options(options: AllOptions, layers: int) -> list[tuple[CheckpointOption, ...]]:
    """List the options of each layer of a stage."""
    total = sum(n for _, n in options)
    return [some for some, n in options for _ in range(max(1, round(n * layers / total)))]


@lru_cache(maxsize=512)
def _solve_forms(options: AllOptions, layers: int, in_flight: int, budget: float) -> RecomputePlan:
    """`options` of every kind of layer, with the number of such layers."""
    stage = _stage_options(options, layers)
    solution = solve_knapsack(stage, [in_flight] * len(stage), budget)
    forms = [option.form for option in solution] if solution is not None else ["full"] * len(stage)
    return RecomputePlan(tuple((form, forms.count(form) / len(forms)) for form in sorted(set(forms))))


def layer_checkpoint_options(scenario: Scenario, layer: LayerShape) -> list[CheckpointOption]:
    """List the forms that a layer can have, as a run would measure them."""
    forms = ["none"]
    if not (scenario.memory_options.compresses and scenario.layout.recompute == "ops"):
        forms.append("ops")
    if layer.attention is not None:
        forms += ["selective", "ops+selective"]
    measured = {form: _checkpoint_counts(scenario, layer, form) for form in forms}
    return checkpoint_options(measured, "cuda" if scenario.on_gpu else "cpu", copies_input=copies_input(scenario))


def _checkpoint_counts(scenario: Scenario, layer: LayerShape, form: str) -> LayerMeasurement:
    full = saved_tensor_bytes(scenario, layer) + score_bytes(scenario, layer)
    selective = saved_tensor_bytes(scenario, layer, "selective")
    tokens, tp, seq_len = scenario.tokens, scenario.layout.tp, scenario.seq_len
    flops = layer.flops(seq_len) * tokens / tp
    core_flops = layer.attention.flops(seq_len) * tokens / tp if layer.attention else 0.0
    saved = saved_bytes(scenario, layer, form)
    return LayerMeasurement(
        saved_bytes=saved,
        core_bytes=full - selective,
        saved_and_input_bytes=saved,  # backward uses what `ops` recomputes at once
        input_bytes=saved_input_bytes(scenario),
        flops=flops,
        recompute_flops=flops,
        core_flops=core_flops,
        core_recompute_flops=core_flops / 2 if scenario.materializes_scores else core_flops,
    )
