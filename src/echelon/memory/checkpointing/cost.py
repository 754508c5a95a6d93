"""What each way to recompute keeps of a layer, and what it does again: the cost of `recompute`. No torch.

none         everything that backward reads is kept
full         a layer keeps its input; its forward is done again
every:N      only every Nth layer keeps its input; N layers are repeated, and are there at once
sqrt         every:N with N the root of the layers: memory grows with that root
selective    attention's scores and what follows from them are not kept, and done again
ops          outputs of products and of attention are kept; operators between them are done again
budget:NGiB  layers do one or another of these so that all fit (budget.py). Here, as many as it takes do `ops`, and
             where that is not enough, `full`
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.layout import Layout

GIB = 1 << 30
ELEMENTWISE_SHARE = 0.45
"""share of a layer's activations that operators between products made, where nobody counted them"""


@dataclass(frozen=True, kw_only=True)
class RecomputeWork:
    forward: float = 0.0
    """share of the layers' forward that is done again"""
    attention: float = 0.0
    """share of attention, beside that"""
    elementwise: float = 0.0
    """share of the operators between products, beside that"""
    saved: float = 1.0
    """share of a layer's activations that is kept"""
    inputs: float = 0.0
    """inputs that are kept, per layer"""
    segment_layers: int = 0
    """layers that are repeated at once"""
    discards_scores: bool = False
    """attention's scores are not kept"""


@dataclass(frozen=True, kw_only=True)
class RecomputedLayers:
    """How many of a rank's layers are repeated in backward, for counting messages."""

    dense: int = 0
    """without experts"""
    dense_tails: int = 0
    """of them, the last of their segments: what they give is not made again"""
    moe: int = 0
    """with experts"""
    moe_tails: int = 0
    attention_cores: int = 0
    """layers of which attention's core alone is repeated"""

    @property
    def layers(self) -> int:
        return self.dense + self.moe

    @property
    def segments(self) -> int:
        return self.dense_tails + self.moe_tails

    @classmethod
    def from_policy(cls, recompute: str, *, layers: int, moe_layers: int = 0, in_flight: int = 1) -> RecomputedLayers:
        """Of so many layers of one stage, `mixtures` of them with experts, and these at the end."""
        kind = recompute.partition(":")[0]
        if kind == "selective":
            return cls(attention_cores=layers)
        if kind not in ("full", "every", "sqrt"):
            return cls()
        length, plain = segment_length(recompute, layers=layers, in_flight=in_flight), layers - moe_layers
        tails = [min(start + length, layers) for start in range(0, layers, length)]
        first = sum(tail <= plain for tail in tails)
        return cls(dense=plain, dense_tails=first, moe=moe_layers, moe_tails=len(tails) - first)


def ineffective_options(layout: Layout) -> dict[str, str]:
    """Switches that would do nothing in a layout, each with why (kept.py)."""
    kind = layout.recompute.partition(":")[0]
    if kind not in ("full", "every", "sqrt", "budget"):
        why = f"recompute={layout.recompute}, which keeps no inputs of layers to repeat them"
        return {"partition": why, "arena": why}
    leave = "activations" in layout.offload.split("+")
    found = {"arena": f"offload={layout.offload}, where inputs leave the device"} if leave else {}
    if layout.tp == 1:
        found["partition"] = "tp=1, where no other rank has the same inputs"
    elif layout.sp or layout.tp_kind != "1d":
        what = "sp=1" if layout.sp else f"tp_kind={layout.tp_kind}"
        found["partition"] = f"{what}, where inputs are divided over tp already"
    return found


def partition_numel(elements: int, ranks: int) -> int:
    """Elements of a slice, padding included."""
    return -(-elements // ranks)


def segment_length(recompute: str, *, layers: float, in_flight: float = 1) -> int:
    """How many of a stage's layers are repeated at once, where so many microbatches of them are in flight."""
    kind, _, number = recompute.partition(":")
    if kind in ("full", "budget"):
        return 1
    length = int(number) if kind == "every" else round(math.sqrt(layers * in_flight))
    return max(1, min(length, math.ceil(layers)))


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
    """`layers` are those in flight on a rank, `whole` the bytes of one's activations, `entry` those of its input.

    Of a model that was counted: `operators` is the share of its activations that operators between products made, and
    `passing` what making them again takes of what those operators took. Where scores are `written_out`, a repetition of
    attention's core ends with them: what they make of the values is kept.
    """
    kind, _, number = recompute.partition(":")
    if kind in ("full", "every", "sqrt"):
        every = segment_length(recompute, layers=layers)
        return RecomputeWork(forward=1.0, saved=0.0, inputs=1 / every, segment_layers=every)
    if kind == "selective":
        return RecomputeWork(attention=0.5 if materialized_scores else 1.0, elementwise=0.5, discards_scores=True)
    if kind == "ops":
        return RecomputeWork(elementwise=elementwise_cost, saved=1 - elementwise_share)
    if kind == "budget":
        room = float(number.removesuffix("GiB")) * GIB / max(layers, 1.0)
        less = (1 - elementwise_share) * layer_bytes
        if room >= less:
            share = min(1.0, max(0.0, (layer_bytes - room) / max(layer_bytes - less, 1.0)))
            return RecomputeWork(elementwise=share * elementwise_cost, saved=1 - share * elementwise_share)
        share = min(1.0, (less - room) / max(less - input_bytes, 1.0))
        return RecomputeWork(
            forward=share,
            elementwise=(1 - share) * elementwise_cost,
            saved=(1 - share) * (1 - elementwise_share),
            inputs=share,
            segment_layers=1,
        )
    return RecomputeWork()
