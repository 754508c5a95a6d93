"""What our kernels (kernels/) keep and move of a layer of our models, counted from what they read and write.

Which layers do what is in our_layers.py.

[Note: kept]

    none   the stream before each part, q, k and v, attention's output, what the activation reads;
           and what can be made of these: the outputs of norms and of the activation
    ops    the first of these alone
    selective   all but what attention's core makes: q and k behind norms of heads and rotations, logarithms
    fp8    the first of these, and of what products read a transposed copy of one byte; under `ops` not that

[Note: moved]

A kernel reads its inputs once and writes its outputs once. Products in 8 bits have what they multiply read in 16 bits
and written in 8: as it lies, and transposed for the gradient of the weight. Under `ops` the transposed one of an input
is written in backward, which reads it once more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

NORM_STAT_BYTES = 16
"""of a token beside a layer: each norm's scale and largest value, in 32 bits"""
FP8_CAST_BYTES = 8
"""bytes moved per weight to have it in 8 bits: read three times in 16, for its largest value and to be written twice"""
GRAD_ACCUMULATE_BYTES = 10
"""bytes moved per weight to add its gradient, of 16 bits, to those before it, in 32"""
EXPERT_GRAD_COPY_BYTES = 4
"""bytes moved per weight of an expert to put its gradient in its place: grouped products do not write there"""


@dataclass(frozen=True, kw_only=True)
class ShardedCount:
    """Of a layer and a token, by what divides it."""

    sp: float = 0.0
    """sequence parallelism alone"""
    tp: float = 0.0
    """tensor parallelism"""
    routed: float = 0.0
    """of rows where their experts are: each goes to all of etp ranks, and to busier ones go more of them"""
    expert: float = 0.0
    """inside experts: the same, but each of etp ranks has a part"""

    def per_rank(self, sp_degree: float, tp: float, *, etp: int = 1, expert_load: float = 1.0) -> float:
        """`crowd` are the rows of experts on a rank, to those of an even load."""
        return self.sp / sp_degree + (self.tp + expert_load * (etp * self.routed + self.expert)) / tp

    def __add__(self, other: ShardedCount) -> ShardedCount:
        return ShardedCount(
            sp=self.sp + other.sp,
            tp=self.tp + other.tp,
            routed=self.routed + other.routed,
            expert=self.expert + other.expert,
        )

    def __rmul__(self, times: float) -> ShardedCount:
        return ShardedCount(
            sp=times * self.sp, tp=times * self.tp, routed=times * self.routed, expert=times * self.expert
        )


ZERO = ShardedCount()


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """Elements per token of one layer of a model of ours, or of a part of it."""

    saved: ShardedCount = ZERO
    """backward reads them, and they cannot be made again"""
    saved_bytes: ShardedCount = ZERO
    """bytes of those whose type is always the same: 32 bits of a gate, places of rows"""
    recomputable: ShardedCount = ZERO
    """backward reads them, and they can be made again"""
    tp_input: float = 0.0
    """of both, what enters regions of tensor parallelism: under sequence parallelism it is gathered, and kept so"""
    core_saved: ShardedCount = ZERO
    """of those kept, what attention's core makes of what the projections gave: the rest of it is its logarithms"""
    attention_copy: ShardedCount = ZERO
    """attention's result where it does not lie as the product behind it reads it, which keeps a copy"""
    core_recompute: ShardedCount = ZERO
    """that operators read and write to make these again, attention itself aside"""
    gemm_inputs: ShardedCount = ZERO
    """that products read"""
    gemm_outputs: ShardedCount = ZERO
    """that products write"""
    forward: ShardedCount = ZERO
    """that operators between products read and write"""
    backward: ShardedCount = ZERO
    recompute: ShardedCount = ZERO
    """that operators read and write to make what can be made again, beside backward"""
    dispatch: ShardedCount = ZERO
    """that operators read and write in forward, and in backward, where rows go to experts elsewhere"""

    def __add__(self, other: LayerCounts) -> LayerCounts:
        names = (field.name for field in fields(self))
        return LayerCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def gathered_bytes(self, tp: int, *, element_bytes: int, low_precision: bool, recompute_ops: bool) -> float:
        """Kept of what enters regions, beyond a rank's slice of it. A gathered tensor is not made again."""
        slices = 0.0 if recompute_ops and self.recomputable.sp else 1 / tp
        return (1 if low_precision else element_bytes) * self.tp_input * (1 - slices)

    def bytes_saved(
        self, *, element_bytes: int, low_precision: bool, recompute_ops: bool, selective: bool = False
    ) -> ShardedCount:
        """Until backward. `narrow`: products are in 8 bits; `remakes`: what can be made again is; `selects`: what
        attention's core makes is. See [Note: kept]."""
        found = element_bytes * self.saved + self.saved_bytes
        found += element_bytes * (-1 * self.core_saved if selective else self.attention_copy)
        if recompute_ops:
            return found
        return found + (self.gemm_inputs if low_precision else element_bytes * self.recomputable)

    def bytes_moved(
        self, *, element_bytes: int, low_precision: bool, recompute_ops: bool, dispatched: bool = False
    ) -> tuple[ShardedCount, ShardedCount, ShardedCount]:
        """In forward, in backward, and to make things again. See [Note: moved]."""
        forward, backward = element_bytes * self.forward, element_bytes * self.backward
        again = element_bytes * self.recompute if recompute_ops else ShardedCount()
        if dispatched:
            forward, backward = (part + element_bytes * self.dispatch for part in (forward, backward))
        if low_precision:
            forward += (3 if recompute_ops else 4) * self.gemm_inputs
            backward += 4 * self.gemm_outputs
            again += (3 if recompute_ops else 0) * self.gemm_inputs
        return forward, backward, again
