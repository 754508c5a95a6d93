"""Blocks of attention with what belongs to each: the mask of its documents, and its part of a dropout.

Ring and gather (ring.py, gather.py) both are: keys arrive, a block is attended to, results are merged. This is the
middle of it, forward and backward; nothing here knows of other ranks.
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
    """What is the same for all blocks of one attention."""

    query_positions: Tensor
    """[queries]: where each query is in the sequence"""
    length: int
    """tokens of the sequence, without padding"""
    documents: Tensor | None
    """[1 or B, padded]: the document of each token of the sequence"""
    hide_padding: bool = False
    """keys beyond the sequence's end must be hidden: no causal mask does"""
    dropout: Dropout | None = None
    """of probabilities, where there is one in force"""
    heads: tuple[int, int] = (0, 1)
    """the first head at hand, and how many there are in all"""

    def block_options(self, block: AttentionBlock, q: Tensor, key_positions: Tensor) -> dict[str, Any]:
        """The options of `attend` for a block whose keys are at these places."""
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
    """One rank's queries and what they have seen so far."""

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
    """q in memory of its own. Keys and values are copied to travel; what they were copied from need not stay for q."""
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)


class BlockwiseBackward:
    """The same in backward: the gradient of the queries adds up."""

    def __init__(self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec):
        self.gradient, self.q, self.out, self.lse, self.mask = gradient, q, out, lse, mask
        self.dq = GradientAccumulator(q)

    def add_block(self, block: AttentionBlock, k: Tensor, v: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """A block's part of the gradients of its keys and values; that of its queries is added up here."""
        rows, keys = block.queries, block.keys
        gradient, q, out, lse = (x[:, :, rows] for x in (self.gradient, self.q, self.out, self.lse))
        options = self.mask.block_options(block, self.q, key_positions)
        dq, dk, dv = attend_backward(gradient, q, k[:, :, keys], v[:, :, keys], out, lse, **options)
        self.dq.add(rows, dq)
        return dk, dv
