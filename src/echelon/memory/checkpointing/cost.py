"""Cost of `recompute`: what each policy saves of a layer, and what it recomputes. No torch.

none         everything that backward reads is saved
full         a layer saves its input; its forward is recomputed
every:N      only every Nth layer saves its input; N layers are recomputed, and are in memory at once
sqrt         every:N with N the square root of the layers: memory grows with that root
selective    core attention (scores, softmax, its dropout, values) is recomputed from the projections' outputs
ops          GEMM and attention outputs are saved; operators between them are recomputed
budget:NGiB  layers use one or another of these so that all fit (memory_budget.py). Here, as many as necessary use
             `ops`, and where that is not enough, `full`
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.layout import Layout

GIB = 1 << 30
ELEMENTWISE_SHARE = 0.45
"""share of a layer's activations that operators between GEMMs make, for models that were not measured"""


@dataclass(frozen=True, kw_only=True)
class RecomputeWork:
    """What a policy recomputes and saves, as shares of the layers' forward and activations."""

    forward: float = 0.0
    """share of the layers' forward that is recomputed"""
    attention: float = 0.0
    """share of core attention, on top"""
    elementwise: float = 0.0
    """share of the operators between GEMMs, on top"""
    saved: float = 1.0
    """share of a layer's activations that is saved"""
    inputs: float = 0.0
    """saved inputs per layer"""
    segment_layers: int = 0
    """layers that are recomputed at once"""
    discards_scores: bool = False
    """attention scores are not saved"""


@dataclass(frozen=True, kw_only=True)
class RecomputedLayers:
    """Number of a rank's layers that are recomputed in backward, for counting collectives."""

    dense: int = 0
    """layers without experts"""
    dense_tails: int = 0
    """of these, the last of their segments, whose output is not recomputed"""
    moe: int = 0
    """layers with experts"""
    moe_tails: int = 0
    attention_cores: int = 0
    """layers of which only core attention is recomputed"""

    @property
    def layers(self) -> int:
        return self.dense + self.moe

    @property
    def segments(self) -> int:
        return self.dense_tails + self.moe_tails

    @classmethod
    def from_policy(cls, recompute: str, *, layers: int, moe_layers: int = 0, in_flight: int = 1) -> RecomputedLayers:
        """Count for `layers` layers of one stage, of which the last `moe_layers` have experts."""
        name = recompute.partition(":")[0]
        if name == "selective":
            return cls(attention_cores=layers)
        if name not in ("full", "every", "sqrt"):
            return cls()
        length, plain = segment_length(recompute, layers=layers, in_flight=in_flight), layers - moe_layers
        tails = [min(start + length, layers) for start in range(0, layers, length)]
        first = sum(tail <= plain for tail in tails)
        return cls(dense=plain, dense_tails=first, moe=moe_layers, moe_tails=len(tails) - first)


def ineffective_options(layout: Layout) -> dict[str, str]:
    """Return the options of saved_inputs.py that have no effect in a layout, each with the reason."""
    name = layout.recompute.partition(":")[0]
    if name not in ("full", "every", "sqrt", "budget"):
        reason = f"recompute={layout.recompute}, which saves no inputs of layers"
        return {"partition": reason, "arena": reason}
    offloads_inputs = "activations" in layout.offload.split("+")
    reasons = {"arena": f"offload={layout.offload}, which moves inputs off the device"} if offloads_inputs else {}
    if layout.tp == 1:
        reasons["partition"] = "tp=1, where no other rank has the same inputs"
    elif layout.sp or layout.tp_kind != "1d":
        sharding = "sp=1" if layout.sp else f"tp_kind={layout.tp_kind}"
        reasons["partition"] = f"{sharding}, where inputs are sharded over tp already"
    return reasons


def partition_numel(elements: int, ranks: int) -> int:
    """Return the elements of one rank's slice, including padding."""
    return -(-elements // ranks)


def segment_length(recompute: str, *, layers: float, in_flight: float = 1) -> int:
    """Return how many of a stage's layers are recomputed at once, with `in_flight` microbatches in flight."""
    name, _, number = recompute.partition(":")
    if name in ("full", "budget"):
        return 1
    length = int(number) if name == "every" else round(math.sqrt(layers * in_flight))
    return max(1, min(length, math.ceil(layers)))


def budget_bytes(recompute: str) -> float:
    """Return the bytes of `budget:NGiB`."""
    return float(recompute.partition(":")[2].removesuffix("GiB")) * GIB


def sufficient_budget(minimum: float) -> str:
    """Return the smallest sufficient budget, to three digits."""
    digits = max(0, 3 - math.ceil(math.log10(minimum / GIB)))
    return f"budget:{math.ceil(minimum / GIB * 10**digits) / 10**digits:.{digits}f}GiB"


def recompute_work(
    recompute: str,
    *,
    layers: float,
    layer_bytes: float,
    input_bytes: float,
    elementwise_share: float = ELEMENTWISE_SHARE,
    elementwise_cost: float = 1.0,
    materialized_scores: bool = False,
) -> RecomputeWork:
    """Return the work of a policy for `layers` layers in flight on a rank.

    `layer_bytes` are a layer's activations and `input_bytes` its input. Of a measured model, `elementwise_share` is the
    share of activations that operators between GEMMs make, and `elementwise_cost` the share of their time that a
    recomputation takes. With `materialized_scores`, recomputing core attention ends with the scores: attention's
    output is saved.
    """
    name = recompute.partition(":")[0]
    if name in ("full", "every", "sqrt"):
        every = segment_length(recompute, layers=layers)
        return RecomputeWork(forward=1.0, saved=0.0, inputs=1 / every, segment_layers=every)
    if name == "selective":
        return RecomputeWork(attention=0.5 if materialized_scores else 1.0, elementwise=0.5, discards_scores=True)
    if name == "ops":
        return RecomputeWork(elementwise=elementwise_cost, saved=1 - elementwise_share)
    if name == "budget":
        bytes_per_layer = budget_bytes(recompute) / max(layers, 1.0)
        ops_bytes = (1 - elementwise_share) * layer_bytes
        if bytes_per_layer >= ops_bytes:
            share = min(1.0, max(0.0, (layer_bytes - bytes_per_layer) / max(layer_bytes - ops_bytes, 1.0)))
            return RecomputeWork(elementwise=share * elementwise_cost, saved=1 - share * elementwise_share)
        share = min(1.0, (ops_bytes - bytes_per_layer) / max(ops_bytes - input_bytes, 1.0))
        return RecomputeWork(
            forward=share,
            elementwise=(1 - share) * elementwise_cost,
            saved=(1 - share) * (1 - elementwise_share),
            inputs=share,
            segment_layers=1,
        )
    return RecomputeWork()
