"""GEMMs on a cube of p x p x p ranks: each matrix in p x p blocks, each block in p parts along the third axis.

[Note: a GEMM on the cube]

X is sharded by rows over (z, y) and by columns over x; W, [out, in], by inputs over x and by outputs over y, and those
again over z. Rank (z, y, x) then

    1. gathers X's rows along y      it has the rows of its z, columns x
    2. gathers W's outputs along z   inputs x, outputs y
    3. multiplies                    rows of z, outputs y: a partial sum over x
    4. scatters the sum along x      Y, by rows over (z, x) and by columns over y

x and y have changed places: the next GEMM of a region exchanges them, and its output is sharded as X was. In backward
dY is gathered along x and serves both gradients, dX is scattered along y, and dW, a partial sum over z, along z. So
every gradient is complete, nothing is replicated, and only a rank's own parts are saved.
After Bian and others, "Maximizing parallelism in distributed training for huge neural networks" (3D).

The embedding, [vocabulary, width], is sharded as the weight of a linear from the residual stream to a region, so the
tied head is such a linear.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from echelon.layout.placement import DimSplit
from echelon.parallel.comm.mesh_axis import CompletedWork, MeshAxes, MeshAxis, PendingWork
from echelon.parallel.tp.vocab_cross_entropy import local_row_index
from echelon.parallel.tp_grid.grid_activations import ActivationSharding, padded_slice
from echelon.parallel.tp_grid.grid_linear import MatmulGrads, Tensors


class Grid3D:
    """A cube of p x p x p ranks."""

    replicated_axes: tuple[str, ...] = ()
    """axes over which weights are replicated"""

    def __init__(self, axes: MeshAxes):
        self.z = axes["z"]
        self.residual = ActivationSharding(axes["z*y"], axes["x"])
        self.region = ActivationSharding(axes["z*x"], axes["y"])

    def weight_cuts(self, outputs: DimSplit, source: ActivationSharding) -> tuple[DimSplit, ...]:
        """Return the splits of a linear's weight, given that of its outputs."""
        along = DimSplit(axis=self.z.name, dim=0, num_parts=self.z.size)
        return outputs, along, source.column_split(1)

    def table_cuts(self) -> tuple[DimSplit, ...]:
        return self.weight_cuts(self.region.column_split(0), self.residual)

    def matmul(self, source: ActivationSharding, target: ActivationSharding) -> Matmul3D:
        return Matmul3D(target.column_axis, source.column_axis, self.z)

    def head_matmul(self) -> Matmul3D:
        return self.matmul(self.residual, self.region)

    def lookup(self, rows: int) -> Lookup3D:
        return Lookup3D(self.residual, self.region.column_axis, self.z, rows)


class Matmul3D:
    """x W^T with W [out over `gathered` and again over z, in over `summed`]."""

    def __init__(self, gathered: MeshAxis, summed: MeshAxis, z: MeshAxis):
        self.gathered, self.summed, self.z = gathered, summed, z

    def forward(self, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> list[Tensor]:
        rows, matrices = all_gather_rows(self.gathered, x), [all_gather_rows(self.z, weight) for weight in weights]
        partial_sums = (rows.result @ m.result[:columns].t() for m, columns in zip(matrices, outputs, strict=True))
        scattered = [reduce_scatter_rows(self.summed, partial_sum) for partial_sum in partial_sums]
        return [pending.result for pending in scattered]

    def backward(self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> MatmulGrads:
        full_dys = [all_gather_rows(self.summed, dy) for dy in dys]
        matrices = [all_gather_rows(self.z, weight) for weight in weights]
        rows = all_gather_rows(self.gathered, x)
        partial_dx = full_dys[0].result @ matrices[0].result[: outputs[0]]
        for dy, matrix, columns in zip(full_dys[1:], matrices[1:], outputs[1:], strict=True):
            partial_dx.addmm_(dy.result, matrix.result[:columns])
        dx, dws = reduce_scatter_rows(self.gathered, partial_dx), []
        for dy, weight, columns in zip(full_dys, weights, outputs, strict=True):
            dw = F.pad(dy.result.t() @ rows.result, (0, 0, 0, self.z.size * len(weight) - columns))
            dws.append(reduce_scatter_rows(self.z, dw))
        return dx.result, [dw.result for dw in dws]


class Lookup3D:
    """Lookup in a table sharded as a weight: each rank looks up its rows, for all tokens of its z."""

    def __init__(self, stream: ActivationSharding, y: MeshAxis, z: MeshAxis, rows: int):
        self.stream, self.y, self.z, self.rows = stream, y, z, rows

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the tokens of a microbatch that this rank looks up."""
        count = self.y.size * self.stream.local_batch(len(ids))
        return padded_slice(ids, self.z.index * count, count, padding=0)

    def forward(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        local, is_remote = local_row_index(ids, self.y.index * self.rows, self.rows, size)
        out = F.embedding(local, all_gather_rows(self.z, table).result[: self.rows])
        return reduce_scatter_rows(self.y, out.masked_fill_(is_remote[..., None], 0.0)).result

    def backward(self, dy: Tensor, ids: Tensor, table: Tensor, size: int) -> Tensor:
        local, is_remote = local_row_index(ids, self.y.index * self.rows, self.rows, size)
        full_dy = all_gather_rows(self.y, dy).result.masked_fill(is_remote[..., None], 0.0).flatten(0, -2)
        full = table.new_zeros(self.z.size * len(table), table.shape[1])
        return reduce_scatter_rows(self.z, full.index_add_(0, local.flatten(), full_dy)).result


class PendingTensor:
    """The result of a collective: launched at once, waited for on use."""

    def __init__(self, tensor: Tensor, work: PendingWork):
        self._tensor, self._work = tensor, work

    @property
    def result(self) -> Tensor:
        self._work.wait()
        self._work = CompletedWork()
        return self._tensor


def all_gather_rows(axis: MeshAxis, part: Tensor) -> PendingTensor:
    """Launch the all-gather of all ranks' parts, one below the other."""
    part = part.detach().contiguous()
    gathered = part.new_empty(axis.size * len(part), *part.shape[1:])
    return PendingTensor(gathered, axis.start_all_gather(gathered, part))


def reduce_scatter_rows(axis: MeshAxis, full: Tensor) -> PendingTensor:
    """Launch the reduce-scatter to this rank's part of the sum."""
    part = full.new_empty(len(full) // axis.size, *full.shape[1:])
    return PendingTensor(part, axis.start_reduce_scatter(part, full.contiguous()))
