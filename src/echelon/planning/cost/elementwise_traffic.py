"""What operators between products move through the device's memory, in a microbatch through all layers."""

from __future__ import annotations

from echelon.planning.cost.step_work import ElementwiseTraffic
from echelon.planning.model.layer_counts import ShardedCount
from echelon.planning.scenario import Scenario

BACKWARD_RATIO = 1.5
"""what operators of others move in backward, to forward"""
ELEMENT_BYTES = 2
"""bytes of an element, as they are counted here"""


def elementwise_traffic(scenario: Scenario, *, recompute_ops: bool | None = None) -> ElementwiseTraffic:
    """`remakes`: what operators made is made again; where it is not said, as the layout has it."""
    recompute_ops = scenario.layout.recompute == "ops" if recompute_ops is None else recompute_ops
    layout, layers, tokens, tp = scenario.layout, scenario.shape.layers, scenario.tokens, scenario.layout.tp
    if not scenario.has_kernels:
        norms = sum(n * tokens * layer.moved_elements / scenario.sp_degree for layer, n in layers)
        others = sum(
            n * tokens * (layer.moved_elements_tp + scenario.expert_load * layer.moved_elements_experts) / tp
            for layer, n in layers
        )
        return ElementwiseTraffic(
            norms=norms,
            other=others,
            backward_ratio=BACKWARD_RATIO,
            recompute_ratio=1.0,
            fused_norms=scenario.fused_norms,
        )
    forward, backward, again, core = ShardedCount(), ShardedCount(), ShardedCount(), ShardedCount()
    options = {
        "low_precision": scenario.is_low_precision,
        "recompute_ops": recompute_ops,
        "dispatched": layout.ep * layout.etp > 1,
    }
    for layer, n in layers:
        assert layer.fused is not None
        moved = layer.fused.bytes_moved(element_bytes=scenario.element_bytes, **options)
        forward, backward, again = (a + n * b for a, b in zip((forward, backward, again), moved, strict=True))
        core += n * scenario.element_bytes * layer.fused.core_recompute
    once, back, made, prepared = (
        part.per_rank(scenario.sp_degree, tp, etp=layout.etp, expert_load=scenario.expert_load)
        for part in (forward, backward, again, core)
    )
    return ElementwiseTraffic(
        norms=tokens * forward.sp / scenario.sp_degree / ELEMENT_BYTES,
        other=tokens * (once - forward.sp / scenario.sp_degree) / ELEMENT_BYTES,
        backward_ratio=back / once,
        recompute_ratio=made / once,
        core_recompute_ratio=prepared / once,
        fused_norms=scenario.fused_norms,
    )
