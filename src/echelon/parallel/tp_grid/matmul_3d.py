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
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis, PendingWork
from echelon.parallel.tp_grid.grid_activations import ActivationSharding, padded_slice
from echelon.parallel.tp_grid.grid_linear import Tensors
from echelon.parallel.tp_grid.grid_vocab import local_row_index


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
        return outputs, along, DimSplit(axis=source.column_axis.name, dim=1, num_parts=source.column_axis.size)

    def table_cuts(self) -> tuple[DimSplit, ...]:
        columns = self.region.column_axis
        return self.weight_cuts(DimSplit(axis=columns.name, dim=0, num_parts=columns.size), self.residual)

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
        rows, matrices = PendingAllGather(self.gathered, x), [PendingAllGather(self.z, weight) for weight in weights]
        going = []
        for matrix, columns in zip(matrices, outputs, strict=True):
            going.append(PendingReduceScatter(self.summed, rows.result @ matrix.result[:columns].t()))
        return [scattered.result for scattered in going]

    def backward(
        self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        above, matrices = (
            [PendingAllGather(self.summed, dy) for dy in dys],
            [PendingAllGather(self.z, weight) for weight in weights],
        )
        rows = PendingAllGather(self.gathered, x)
        of_input = above[0].result @ matrices[0].result[: outputs[0]]
        for dy, matrix, columns in zip(above[1:], matrices[1:], outputs[1:], strict=True):
            of_input.addmm_(dy.result, matrix.result[:columns])
        dx = PendingReduceScatter(self.gathered, of_input)
        going = []
        for dy, weight, columns in zip(above, weights, outputs, strict=True):
            dw = F.pad(dy.result.t() @ rows.result, (0, 0, 0, self.z.size * len(weight) - columns))
            going.append(PendingReduceScatter(self.z, dw))
        return dx.result, [scattered.result for scattered in going]


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
        found = F.embedding(local, PendingAllGather(self.z, table).result[: self.rows])
        return PendingReduceScatter(self.y, found.masked_fill_(is_remote[..., None], 0.0)).result

    def backward(self, dy: Tensor, ids: Tensor, table: Tensor, size: int) -> Tensor:
        local, is_remote = local_row_index(ids, self.y.index * self.rows, self.rows, size)
        above = PendingAllGather(self.y, dy).result.masked_fill(is_remote[..., None], 0.0).flatten(0, -2)
        whole = table.new_zeros(self.z.size * len(table), table.shape[1])
        return PendingReduceScatter(self.z, whole.index_add_(0, local.flatten(), above)).result


class PendingAllGather:
    """An all-gather of all ranks' parts, one below the other: launched at once, waited for on use."""

    def __init__(self, axis: MeshAxis, part: Tensor):
        part = part.detach().contiguous()
        self._result = part.new_empty(axis.size * len(part), *part.shape[1:])
        self._work: PendingWork | None = axis.start_all_gather(self._result, part)

    @property
    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class PendingReduceScatter:
    """A reduce-scatter to this rank's part of the sum: launched at once, waited for on use."""

    def __init__(self, axis: MeshAxis, whole: Tensor):
        self._result = whole.new_empty(len(whole) // axis.size, *whole.shape[1:])
        self._work: PendingWork | None = axis.start_reduce_scatter(self._result, whole.contiguous())

    @property
    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result
