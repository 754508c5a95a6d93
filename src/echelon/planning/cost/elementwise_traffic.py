"""Memory traffic of the operators between GEMMs, in one microbatch through all layers."""

from __future__ import annotations

from echelon.planning.calibrate.programs import UNFUSED_CASTS
from echelon.planning.cost.step_work import ElementwiseTraffic
from echelon.planning.model.layer_counts import ShardedCount
from echelon.planning.scenario import Scenario

BACKWARD_RATIO = 1.5
"""traffic of backward over that of forward, in other programs"""
CAST_KERNELS = 2.0
"""that cast the input of a GEMM along its rows and along its columns, where no kernel does both"""
EXPERT_CASTS = 2.0
"""the same of grouped GEMMs: each expert's rows are padded to whole blocks of scales, then cast"""
ELEMENT_BYTES = 2
"""of the elements that `ElementwiseTraffic` counts"""


def elementwise_traffic(scenario: Scenario, *, recompute_ops: bool | None = None) -> ElementwiseTraffic:
    """Count the traffic, with recompute=ops or without; by default as the layout says."""
    if recompute_ops is None:
        recompute_ops = scenario.layout.recompute == "ops"
    return _kernel_traffic(scenario, recompute_ops) if scenario.has_kernels else _assumed_traffic(scenario)


def _assumed_traffic(scenario: Scenario) -> ElementwiseTraffic:
    """Traffic of other programs, by what the model's shape assumes."""
    tokens, tp, cp = scenario.tokens, scenario.layout.tp, scenario.layout.cp
    layers = [
        (layer, n, tokens * layer.gathered_factor(layer.gathered_moved, cp)) for layer, n in scenario.shape.layers
    ]
    load = scenario.expert_load
    norms = sum(n * moved * layer.moved_elements / scenario.sp_degree for layer, n, moved in layers)
    experts = sum(n * tokens * load * layer.moved_elements_experts for layer, n, _ in layers) / tp
    dense = sum(n * moved * layer.moved_elements_tp for layer, n, moved in layers) / tp
    kernels = CAST_KERNELS if scenario.program in UNFUSED_CASTS else 1.0
    return ElementwiseTraffic(
        norms=norms,
        other=dense + experts,
        # An element that is written and read counts twice.
        cast=(kernels * (norms + dense) + EXPERT_CASTS * experts) / 2,
        backward_ratio=BACKWARD_RATIO,
        recompute_ratio=1.0,
        fused_norms=scenario.fused_norms,
    )


def _kernel_traffic(scenario: Scenario, recompute_ops: bool) -> ElementwiseTraffic:
    """Traffic of Echelon's kernels, by what they read and write."""
    layout, size = scenario.layout, scenario.element_bytes
    forward = backward = recompute = core = ShardedCount()
    for layer, n in scenario.shape.layers:
        assert layer.fused is not None
        moved = layer.fused.bytes_moved(
            element_bytes=size,
            low_precision=scenario.is_low_precision,
            recompute_ops=recompute_ops,
            dispatched=layout.ep * layout.etp > 1,
        )
        forward, backward, recompute = forward + n * moved[0], backward + n * moved[1], recompute + n * moved[2]
        core += n * size * layer.fused.core_recompute

    def per_rank(count: ShardedCount) -> float:
        return count.per_rank(scenario.sp_degree, layout.tp, etp=layout.etp, expert_load=scenario.expert_load)

    norms, total = forward.sp / scenario.sp_degree, per_rank(forward)
    return ElementwiseTraffic(
        norms=scenario.tokens * forward.sp / scenario.sp_degree / ELEMENT_BYTES,
        other=scenario.tokens * (total - norms) / ELEMENT_BYTES,
        backward_ratio=per_rank(backward) / total,
        recompute_ratio=per_rank(recompute) / total,
        core_recompute_ratio=per_rank(core) / total,
        fused_norms=scenario.fused_norms,
    )
