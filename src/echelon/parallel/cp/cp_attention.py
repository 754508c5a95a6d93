"""Blockwise attention with the document mask and dropout of each block, for one rank.

Ring and all-gather attention both receive keys, attend to a block, and merge the results. This is what they share,
forward and backward; it communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels.attention.blockwise_attention import (
    PLAIN_SCORES,
    AttentionMerger,
    GradientAccumulator,
    ScoreOptions,
    accumulation_dtype,
    add_sinks,
    attend,
    attend_backward,
    sink_gradient,
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
    scores: ScoreOptions = PLAIN_SCORES
    """scale and cap; a block knows its window"""

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
        scores = replace(self.scores, window=block.window)
        options = {"causal": block.causal, "mask": mask, "dropout_mask": dropout_mask}
        return {**options, "scores": scores, "shift": block.shift}


class KeyValueGrads(Protocol):
    """The gradients of a rank's keys and values, to which every rank contributes."""

    def add(self, step: int, block: AttentionBlock, parts: Sequence[Tensor]) -> None:
        """Add the partial gradients of a block's keys and values."""

    def result(self) -> Tensor:
        """Return the sums over all ranks of the gradients of this rank's keys and values."""


class ContextParallelAttention:
    """One rank's attention to the keys and values of all ranks, for sequences of one length."""

    local_positions: Tensor
    """[queries]: position of each of this rank's tokens in the sequence"""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = _BlockwiseAttentionFunction.apply(copy_if_shared(q, k), torch.stack((k, v)), sinks, self, mask)
        return out

    def kv_blocks(self, kv: Tensor) -> Iterator[tuple[AttentionBlock, Tensor, Tensor]]:
        """Yield every block, with its keys and values and their positions, from this rank's keys and values."""
        raise NotImplementedError

    def kv_grads(self, kv: Tensor) -> KeyValueGrads:
        raise NotImplementedError


class _BlockwiseAttentionFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, attention: ContextParallelAttention, mask: MaskSpec
    ) -> Tensor:
        ctx.attention, ctx.mask = attention, mask
        merged = AttentionMerger(q)
        for block, (k, v), positions in attention.kv_blocks(kv):
            rows, keys, options = block.queries, block.keys, mask.block_options(block, q, positions)
            merged.add(rows, *attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], **options))
        out, lse = merged.result()
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        dq, kv_grads = GradientAccumulator(q), ctx.attention.kv_grads(kv)
        for step, (block, (k, v), positions) in enumerate(ctx.attention.kv_blocks(kv)):
            rows, keys, options = block.queries, block.keys, ctx.mask.block_options(block, q, positions)
            dy, q_rows, y, lse_rows = (x[:, :, rows] for x in (gradients[0], q, out, lse))
            dq_rows, *dkv = attend_backward(dy, q_rows, k[:, :, keys], v[:, :, keys], y, lse_rows, **options)
            dq.add(rows, dq_rows)
            kv_grads.add(step, block, dkv)
            del dq_rows, dkv  # the next block needs their memory
        dsinks = None if sinks is None else sink_gradient(gradients[0], out, lse, sinks)
        return dq.result(), kv_grads.result(), dsinks, None, None


def copy_if_shared(q: Tensor, k: Tensor) -> Tensor:
    """Return q in storage of its own. Keys and values are copied to be sent; q must not keep their source alive."""
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)
