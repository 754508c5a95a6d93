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

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.kernels import tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis

SEQUENCE_DIM = 1
"""the tensor dimension of positions: activations are [batch, sequence, ...]"""


class FullSequenceBoundary:
    """Region boundary without sequence parallelism: every rank holds the full sequence outside (sp=0)."""

    def __init__(self, axis: MeshAxis):
        self.axis = axis
        self.length = 0
        """unused: nothing is padded"""

    def enter(self, x: Tensor) -> Tensor:
        out = with_backward(x, lambda x: x.view_as(x), lambda dy: self.axis.all_reduce(dy.contiguous()))
        # The same tensor can still be recomputed; its gradient is a partial sum, which recompute must not read.
        metadata = tensor_metadata.read(x)
        if (recompute := metadata.recompute) is None:
            return out
        copied = TensorMetadata(row_amax=metadata.row_amax, recompute=lambda _part: recompute(None))
        return tensor_metadata.attach(out, copied)

    def leave(self, x: Tensor) -> Tensor:
        def reduce(x: Tensor) -> Tensor:
            # The GEMM that produced x does not save it, so it may be reduced in place, and unknown to autograd
            # (`.data`), which cannot follow an in-place change of a custom function's output. The result is no view
            # of x, so that a model may change it in place.
            return self.axis.all_reduce(x.data)

        return with_backward(x, reduce, lambda dy: dy)


class SequenceParallelBoundary:
    """Region boundary with sequence parallelism: outside, a rank holds a slice of the sequence (sp=1)."""

    def __init__(self, axis: MeshAxis):
        self.axis = axis
        self.length = 0
        """length of the current sequence without padding, noted where it was last full"""

    def enter(self, x: Tensor) -> Tensor:
        axis, length = self.axis, self.length
        return with_backward(
            x, lambda x: all_gather_sequence(x, axis, length), lambda dy: reduce_scatter_sequence(dy, axis)
        )

    def leave(self, x: Tensor) -> Tensor:
        axis, length = self.axis, x.shape[SEQUENCE_DIM]
        self.length = length
        return with_backward(
            x, lambda x: reduce_scatter_sequence(x, axis), lambda dy: all_gather_sequence(dy, axis, length)
        )


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
