"""Blockwise attention with the document mask and dropout of each block, for one rank.

Ring and all-gather attention both receive keys, attend to a block, and merge the results. This is the middle part,
forward and backward; it communicates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from echelon.kernels.attention.blockwise_attention import (
    AttentionMerger,
    GradientAccumulator,
    accumulation_dtype,
    attend,
    attend_backward,
)
from echelon.parallel.cp.zigzag import AttentionBlock
from echelon.rng import Dropout, PartialDims


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Masks and dropout of one attention, common to all its blocks."""

    query_positions: Tensor
    """[queries]: position of each query in the sequence"""
    length: int
    """tokens of the sequence, without padding"""
    documents: Tensor | None
    """[1 or B, padded]: the document of each token of the sequence"""
    hide_padding: bool = False
    """mask keys beyond the sequence's end, since no causal mask does"""
    dropout: Dropout | None = None
    """dropout of attention probabilities, if it is active"""
    heads: tuple[int, int] = (0, 1)
    """first local head, and number of all heads"""

    def block_options(self, block: AttentionBlock, q: Tensor, key_positions: Tensor) -> dict[str, Any]:
        """Return the options of `attend` for a block whose keys have these positions."""
        rows, keys = self.query_positions[block.queries], key_positions[block.keys]
        mask = dropout_mask = None
        if self.documents is not None:
            mask = (self.documents[:, rows].unsqueeze(2) == self.documents[:, keys].unsqueeze(1)).unsqueeze(1)
        if self.hide_padding:
            inside = (keys < self.length).view(1, 1, 1, -1)
            mask = inside if mask is None else mask & inside
        if self.dropout is not None:
            window: PartialDims = {1: self.heads, 2: (rows, self.length), 3: (keys, self.length)}
            shape = (q.shape[0], q.shape[1], len(rows), len(keys))
            dropout_mask = self.dropout.scaled_mask(shape, window, q.new_empty(0, dtype=accumulation_dtype(q.dtype)))
        return {"causal": block.causal, "mask": mask, "dropout_mask": dropout_mask}


@dataclass
class BlockwiseForward:
    """Forward of one rank's queries: the merged result of the blocks so far."""

    q: Tensor
    mask: MaskSpec
    merged: AttentionMerger = field(init=False)

    def __post_init__(self) -> None:
        self.merged = AttentionMerger(self.q)

    def add_block(self, block: AttentionBlock, k: Tensor, v: Tensor, key_positions: Tensor) -> None:
        q = self.q[:, :, block.queries]
        options = self.mask.block_options(block, self.q, key_positions)
        self.merged.add(block.queries, *attend(q, k[:, :, block.keys], v[:, :, block.keys], **options))


def copy_if_shared(q: Tensor, k: Tensor) -> Tensor:
    """Return q in storage of its own. Keys and values are copied to be sent; q must not keep their source alive."""
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)


class BlockwiseBackward:
    """Backward of one rank's queries: their gradient accumulates over the blocks."""

    def __init__(self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec):
        self.gradient, self.q, self.out, self.lse, self.mask = gradient, q, out, lse, mask
        self.dq = GradientAccumulator(q)

    def add_block(self, block: AttentionBlock, k: Tensor, v: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return a block's partial gradients of its keys and values; accumulate that of its queries."""
        rows, keys = block.queries, block.keys
        gradient, q, out, lse = (x[:, :, rows] for x in (self.gradient, self.q, self.out, self.lse))
        options = self.mask.block_options(block, self.q, key_positions)
        dq, dk, dv = attend_backward(gradient, q, k[:, :, keys], v[:, :, keys], out, lse, **options)
        self.dq.add(rows, dq)
        return dk, dv
