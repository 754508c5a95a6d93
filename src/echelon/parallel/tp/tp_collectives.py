"""Collectives at the boundaries of a tensor-parallel region: each one's backward is the other side's forward.

    function   forward                                 backward
    copy       identity                                all-reduce
    reduce     all-reduce                              identity
    gather     all-gather the sequence, trim padding   pad, reduce-scatter
    scatter    pad, reduce-scatter the sequence        all-gather, trim padding

`copy` and `reduce` bound a region without sequence parallelism (every rank holds the full sequence outside it);
`gather` and `scatter` bound one with it (outside, a rank holds its slice of the sequence, padded at the end so that all
slices are equal).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from echelon.kernels import tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.parallel.comm.mesh_axis import MeshAxis

SEQUENCE_DIM = 1
"""the tensor dimension of positions: activations are [batch, sequence, ...]"""


class _CopyToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradients[0].contiguous()), None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        # The GEMM that produced x does not save it, so it may be reduced in place, and unknown to autograd (`.data`),
        # which cannot follow an in-place change of a custom function's output.
        axis.all_reduce(x.data)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, length: int) -> Tensor:
        ctx.axis = axis
        return all_gather_sequence(x, axis, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_sequence(gradients[0], ctx.axis), None, None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis, ctx.length = axis, x.shape[SEQUENCE_DIM]
        return reduce_scatter_sequence(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(gradients[0], ctx.axis, ctx.length), None


class FullSequenceBoundary:
    """Region boundary without sequence parallelism: every rank holds the full sequence outside (sp=0)."""

    def __init__(self, axis: MeshAxis):
        self.axis = axis
        self.length = 0
        """unused: nothing is padded"""

    def enter(self, x: Tensor) -> Tensor:
        out: Tensor = _CopyToRegion.apply(x, self.axis)
        # The same tensor can still be recomputed; its gradient is a partial sum, which recompute must not read.
        metadata = tensor_metadata.read(x)
        recompute = metadata.recompute
        if recompute is None:
            return out
        return tensor_metadata.attach(
            out, TensorMetadata(row_amax=metadata.row_amax, recompute=lambda _part: recompute(None))
        )

    def leave(self, x: Tensor) -> Tensor:
        out: Tensor = _ReduceFromRegion.apply(x, self.axis)
        return out


class SequenceParallelBoundary:
    """Region boundary with sequence parallelism: outside, a rank holds a slice of the sequence (sp=1)."""

    def __init__(self, axis: MeshAxis):
        self.axis = axis
        self.length = 0
        """length of the current sequence without padding, noted where it was last full"""

    def enter(self, x: Tensor) -> Tensor:
        out: Tensor = _GatherSequence.apply(x, self.axis, self.length)
        return out

    def leave(self, x: Tensor) -> Tensor:
        self.length = x.shape[SEQUENCE_DIM]
        out: Tensor = _ScatterSequence.apply(x, self.axis)
        return out


RegionBoundary = FullSequenceBoundary | SequenceParallelBoundary


def positions_per_rank(length: int, axis: MeshAxis) -> int:
    """Return the positions of a sequence that each rank holds, padding included."""
    return -(-length // axis.size)


def all_gather_sequence(x: Tensor, axis: MeshAxis, length: int) -> Tensor:
    """Gather [batch, slice, ...] of each rank to [batch, length, ...] on all."""
    batch, part = x.shape[0], x.shape[SEQUENCE_DIM]
    full = x.new_empty(axis.size * batch, *x.shape[1:])
    axis.start_all_gather(full, x.contiguous()).wait()
    full = full.view(axis.size, batch, *x.shape[1:]).transpose(0, 1)
    return full.reshape(batch, axis.size * part, *x.shape[2:])[:, :length].contiguous()


def reduce_scatter_sequence(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum [batch, length, ...] over the ranks; each keeps its [batch, slice, ...]."""
    batch, length, rest = x.shape[0], x.shape[SEQUENCE_DIM], x.shape[2:]
    part = positions_per_rank(length, axis)
    if part * axis.size != length:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, part * axis.size - length))
    x = x.reshape(batch, axis.size, part, *rest).transpose(0, 1).reshape(axis.size * batch, part, *rest)
    out = x.new_empty(batch, part, *rest)
    axis.start_reduce_scatter(out, x.contiguous()).wait()
    return out


def local_sequence_slice(x: Tensor, axis: MeshAxis) -> Tensor:
    """Return this rank's slice of a sequence that every rank holds; padding repeats the last position."""
    length = x.shape[SEQUENCE_DIM]
    part = positions_per_rank(length, axis)
    index = torch.arange(axis.index * part, (axis.index + 1) * part, device=x.device).clamp_(max=length - 1)
    return x.index_select(SEQUENCE_DIM, index)
