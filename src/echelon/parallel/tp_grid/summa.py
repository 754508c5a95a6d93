"""SUMMA: GEMMs of matrices in q x q blocks, which are broadcast along the rows and columns of a grid of q x q ranks.

[Note: three GEMMs, closed under differentiation]

    A B     C[i,j] = sum over k of A[i,k] B[k,j]      q steps: A's k-th column of blocks goes along x, B's k-th row
                                                      along y, and each rank accumulates a GEMM of two blocks
    A B^T   C[i,k] = sum over j of A[i,j] B[k,j]^T    q steps: B's k-th row goes along y, and the GEMMs of a row
                                                      of the grid are reduced at x = k
    A^T B   C[k,j] = sum over i of A[i,k]^T B[i,j]    q steps: A's k-th column goes along x, and the GEMMs of a
                                                      column of the grid are reduced at y = k

    C = A B      dA = dC B^T      dB = A^T dC
    C = A B^T    dA = dC B        dB = dC^T A

So forward and backward need nothing else, and save only a rank's own blocks. After Xu and others, "An
efficient 2D method for training super-large deep learning models" (Optimus). With several layers of such a grid (2.5d;
Wang and others, "Tesseract") each layer has other sequences and replicates the weights, whose gradients are summed over
the layers (z) once a step.

A linear's weight is stored transposed, [out, in]: B[k,j] is block (out j, in k), dim 0 over x and dim 1 over y. The
embedding, [vocabulary, width], is transposed, dim 0 over y: a lookup is A B with A the one-hot tokens, the tied head
A B^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.layout.placement import DimSplit
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis, PendingWork
from echelon.parallel.tp.vocab_cross_entropy import local_row_index
from echelon.parallel.tp_grid.grid_activations import ActivationSharding
from echelon.parallel.tp_grid.grid_linear import MatmulGrads, Tensors


class SummaGrid:
    """A grid of q x q ranks, or several layers of it."""

    def __init__(self, axes: MeshAxes):
        self.x, self.y = axes["x"], axes["y"]
        self.residual = self.region = ActivationSharding(axes["z*y"], axes["x"])
        self.replicated_axes = ("z",) if axes["z"].size > 1 else ()
        """axes over which weights are replicated"""

    def weight_cuts(self, outputs: DimSplit, source: ActivationSharding) -> tuple[DimSplit, ...]:
        """Return the splits of a linear's weight, given that of its outputs."""
        return outputs, DimSplit(axis="y", dim=1, num_parts=self.y.size)

    def table_cuts(self) -> tuple[DimSplit, ...]:
        return DimSplit(axis="y", dim=0, num_parts=self.y.size), DimSplit(axis="x", dim=1, num_parts=self.x.size)

    def matmul(self, source: ActivationSharding, target: ActivationSharding) -> SummaMatmul:
        return SummaMatmul(self.x, self.y)

    def head_matmul(self) -> SummaTransposedMatmul:
        return SummaTransposedMatmul(self.x, self.y)

    def lookup(self, rows: int) -> SummaLookup:
        return SummaLookup(self.residual, self.y)


class SummaMatmul:
    """x W^T with W [out over x, in over y]: A B."""

    def __init__(self, x: MeshAxis, y: MeshAxis):
        self.x, self.y = x, y

    def forward(self, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> list[Tensor]:
        ys = [x.new_zeros(len(x), len(weight)) for weight in weights]
        for (left,), blocks in zip(BroadcastBlocks(self.x, [x]), BroadcastBlocks(self.y, weights), strict=True):
            for y, block in zip(ys, blocks, strict=True):
                y.addmm_(left, block.t())
        return ys

    def backward(self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> MatmulGrads:
        (dx,) = reduce_blocks(self.x, ([_sum_of_matmuls(dys, blocks)] for blocks in BroadcastBlocks(self.y, weights)))
        return dx, reduce_blocks(self.y, ([dy.t() @ block for dy in dys] for (block,) in BroadcastBlocks(self.x, [x])))


class SummaTransposedMatmul:
    """x E^T with E [rows over y, columns over x] and x's columns over x: A B^T."""

    def __init__(self, x: MeshAxis, y: MeshAxis):
        self.x, self.y = x, y

    def forward(self, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> list[Tensor]:
        weight_blocks = BroadcastBlocks(self.y, weights)
        return reduce_blocks(self.x, ([x @ block.t() for block in blocks] for blocks in weight_blocks))

    def backward(self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> MatmulGrads:
        dx = torch.zeros_like(x)

        def of_weights() -> Iterator[list[Tensor]]:
            for lefts, blocks in zip(BroadcastBlocks(self.x, dys), BroadcastBlocks(self.y, weights), strict=True):
                dx.add_(_sum_of_matmuls(lefts, blocks))
                yield [left.t() @ x for left in lefts]

        return dx, reduce_blocks(self.y, of_weights())


def _sum_of_matmuls(lefts: Tensors, rights: Tensors) -> Tensor:
    out = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        out.addmm_(left, right)
    return out


class SummaLookup:
    """Lookup in a table [rows over y, columns over x]: blocks of rows are broadcast along y."""

    def __init__(self, stream: ActivationSharding, y: MeshAxis):
        self.stream, self.y = stream, y

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the tokens of a microbatch that this rank looks up."""
        return self.stream.local_sequences(ids, padding=0)

    def forward(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        out = table.new_zeros(*ids.shape, table.shape[1])
        for k, (block,) in enumerate(BroadcastBlocks(self.y, [table])):
            local, is_remote = local_row_index(ids, k * len(table), len(table), size)
            out += F.embedding(local, block).masked_fill_(is_remote[..., None], 0.0)
        return out

    def backward(self, dy: Tensor, ids: Tensor, table: Tensor, size: int) -> Tensor:
        def of_blocks() -> Iterator[list[Tensor]]:
            for k in range(self.y.size):
                local, is_remote = local_row_index(ids, k * len(table), len(table), size)
                local_dy = dy.masked_fill(is_remote[..., None], 0.0).flatten(0, -2)
                yield [torch.zeros_like(table).index_add_(0, local.flatten(), local_dy)]

        return reduce_blocks(self.y, of_blocks())[0]


class BroadcastBlocks:
    """Every rank's blocks, one rank after another: the next broadcast overlaps the use of the current blocks."""

    def __init__(self, axis: MeshAxis, local_blocks: Sequence[Tensor]):
        self.axis, self.local_blocks = axis, [block.detach().contiguous() for block in local_blocks]
        self._next = self._start(0)

    def _start(self, place: int) -> list[tuple[Tensor, PendingWork]]:
        is_local = place == self.axis.index
        blocks = self.local_blocks if is_local else [torch.empty_like(block) for block in self.local_blocks]
        return [(block, self.axis.start_broadcast(block, place)) for block in blocks]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for place in range(self.axis.size):
            pending_blocks = self._next
            if place + 1 < self.axis.size:
                self._next = self._start(place + 1)
            for _, pending in pending_blocks:
                pending.wait()
            yield [block for block, _ in pending_blocks]


def reduce_blocks(axis: MeshAxis, parts: Iterable[list[Tensor]]) -> list[Tensor]:
    """Return the sums over an axis of its ranks' k-th parts, k this rank's index; reductions overlap later parts.

    Parts, and so their sums, may be several tensors each.
    """
    local: list[Tensor] = []
    reductions: list[PendingWork] = []
    for place, several in enumerate(parts):
        for pending in reductions:
            pending.wait()
        reductions = [axis.start_reduce(part, place) for part in several]
        local = several if place == axis.index else local
    for pending in reductions:
        pending.wait()
    return local
