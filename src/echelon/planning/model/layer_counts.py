"""`LayerCounts`: elements that the operators of one layer save and move, counted from what they read and write.

layer_families.py counts the layers of Echelon's models.

[Note: saved]

    none        the residual stream before each block, q, k and v, attention's output, the activation's input; and what
                recompute=ops can compute from these: the outputs of norms and of the activation
    ops         the former alone
    selective   all but what the attention core computes: q and k after their norms and RoPE, the log-sum-exp
    fp8         the former, and a transposed copy in one byte of what GEMMs read; under `ops` not that copy

[Note: moved]

A kernel reads its inputs once and writes its outputs once. GEMMs in fp8 read their operands in 16 bits and write them
in 8, once as they are and once transposed for the weight gradient. Under `ops` backward writes the transposed copy of
an input, and reads that input once more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

NORM_STAT_BYTES = 16
"""saved per token and layer: scale and largest value of each norm, in float32"""
FP8_CAST_BYTES = 8
"""moved to cast a weight to fp8: it is read three times, for its largest value and for both copies"""
GRAD_ACCUMULATE_BYTES = 10
"""moved to add a weight's 16-bit gradient to its float32 sum"""
EXPERT_GRAD_COPY_BYTES = 4
"""moved to copy an expert weight's gradient into its buffer, which grouped GEMMs cannot write to"""


@dataclass(frozen=True, kw_only=True)
class ShardedCount:
    """Elements per token of one layer, by the parallelism that divides them."""

    sp: float = 0.0
    """divided by sequence parallelism alone"""
    tp: float = 0.0
    """divided by tensor parallelism"""
    routed: float = 0.0
    """of tokens where their experts are: each etp rank has all of them, the busiest rank the most"""
    expert: float = 0.0
    """inside experts: as `routed`, divided by etp"""

    def per_rank(self, sp_degree: float, tp: float, *, etp: int = 1, expert_load: float = 1.0) -> float:
        """Elements on one rank, whose experts have `expert_load` times the tokens of an even load."""
        return self.sp / sp_degree + (self.tp + expert_load * (etp * self.routed + self.expert)) / tp

    def __add__(self, other: ShardedCount) -> ShardedCount:
        sp, tp, routed, expert = other.sp, other.tp, other.routed, other.expert
        return ShardedCount(sp=self.sp + sp, tp=self.tp + tp, routed=self.routed + routed, expert=self.expert + expert)

    def __rmul__(self, x: float) -> ShardedCount:
        return ShardedCount(sp=x * self.sp, tp=x * self.tp, routed=x * self.routed, expert=x * self.expert)


ZERO = ShardedCount()


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """Elements per token that one layer, or one block of it, saves for backward and moves through memory."""

    saved: ShardedCount = ZERO
    """by every recompute policy but `full`"""
    saved_bytes: ShardedCount = ZERO
    """bytes of what has the same dtype in every precision: a gate's float32, token indices"""
    recomputable: ShardedCount = ZERO
    """saved unless recompute=ops"""
    tp_input: float = 0.0
    """inputs of tensor-parallel regions, which sequence parallelism gathers, and saves gathered"""
    core_saved: ShardedCount = ZERO
    """of `saved`, what the attention core computes from the projections; its log-sum-exp comes on top"""
    attention_copy: ShardedCount = ZERO
    """a copy of attention's output, where the projection behind it needs another memory layout"""
    core_recompute: ShardedCount = ZERO
    """moved by operators to recompute the core, attention itself aside"""
    gemm_inputs: ShardedCount = ZERO
    gemm_outputs: ShardedCount = ZERO
    forward: ShardedCount = ZERO
    """moved by operators between GEMMs"""
    backward: ShardedCount = ZERO
    recompute: ShardedCount = ZERO
    """moved under recompute=ops, on top of backward"""
    dispatch: ShardedCount = ZERO
    """moved in forward, and in backward, where tokens travel to experts on other ranks"""

    def __add__(self, other: LayerCounts) -> LayerCounts:
        names = (field.name for field in fields(self))
        return LayerCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def gathered_bytes(self, tp: int, *, element_bytes: int, low_precision: bool, recompute_ops: bool) -> float:
        """Bytes that sequence parallelism saves of gathered region inputs, beyond a rank's slice.

        recompute=ops does not recompute a gathered tensor.
        """
        slice_share = 0.0 if recompute_ops and self.recomputable.sp else 1 / tp
        return (1 if low_precision else element_bytes) * self.tp_input * (1 - slice_share)

    def bytes_saved(
        self, *, element_bytes: int, low_precision: bool, recompute_ops: bool, selective: bool = False
    ) -> ShardedCount:
        """Bytes saved for backward. See [Note: saved]."""
        size = element_bytes * self.saved + self.saved_bytes
        size += element_bytes * (-1 * self.core_saved if selective else self.attention_copy)
        if recompute_ops:
            return size
        return size + (self.gemm_inputs if low_precision else element_bytes * self.recomputable)

    def bytes_moved(
        self, *, element_bytes: int, low_precision: bool, recompute_ops: bool, dispatched: bool = False
    ) -> tuple[ShardedCount, ShardedCount, ShardedCount]:
        """Bytes moved in forward, in backward and by recomputation. See [Note: moved]."""
        forward, backward = element_bytes * self.forward, element_bytes * self.backward
        recompute = element_bytes * self.recompute if recompute_ops else ShardedCount()
        if dispatched:
            forward, backward = (count + element_bytes * self.dispatch for count in (forward, backward))
        if low_precision:
            forward += (3 if recompute_ops else 4) * self.gemm_inputs
            backward += 4 * self.gemm_outputs
            recompute += (3 if recompute_ops else 0) * self.gemm_inputs
        return forward, backward, recompute
