"""Products on a cube of p x p x p ranks: each matrix in p x p blocks, each block in p parts along the third axis.

[Note: a product on the cube]

X is divided by rows over (z, y) and by columns over x; W, [out, in], by inputs over x and by outputs over y, and those
again over z. Rank (z, y, x) then

    1. gathers X's rows along y      it has the rows of its z, columns x
    2. gathers W's outputs along z   inputs x, outputs y
    3. multiplies                    rows of z, outputs y: a part of a sum over x
    4. scatters the sum along x      Y, by rows over (z, x) and by columns over y

x and y have changed places: the next product of a region exchanges them, and gives back what lies as X did. Backward
goes the same way back: dY is gathered along x and serves both gradients, dX is scattered along y, and dW, a part of a
sum over z, along z. So every gradient is whole, nothing is held twice, and only a rank's own parts are kept.
After Bian and others, "Maximizing parallelism in distributed training for huge neural networks" (3D).

The embedding, [vocabulary, width], lies as the weight of a product from the stream to a region does, so the tied head
is such a product.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from echelon.layout.placement import Cut
from echelon.parallel.comm.mesh_axis import Axes, Axis, Pending
from echelon.parallel.tp_grid.grid_activations import Side, taken
from echelon.parallel.tp_grid.grid_linear import Tensors
from echelon.parallel.tp_grid.grid_vocab import places


class Cube:
    """A cube of p x p x p ranks."""

    copied: tuple[str, ...] = ()
    """axes over which weights are copied"""

    def __init__(self, axes: Axes):
        self.z = axes["z"]
        self.stream = Side(axes["z*y"], axes["x"])
        self.region = Side(axes["z*x"], axes["y"])

    def weight_cuts(self, outputs: Cut, source: Side) -> tuple[Cut, ...]:
        """How a linear's weight is divided; `outputs` says how its outputs are."""
        along = Cut(axis=self.z.name, dim=0, parts=self.z.size)
        return outputs, along, Cut(axis=source.columns.name, dim=1, parts=source.columns.size)

    def table_cuts(self) -> tuple[Cut, ...]:
        columns = self.region.columns
        return self.weight_cuts(Cut(axis=columns.name, dim=0, parts=columns.size), self.stream)

    def product(self, source: Side, target: Side) -> Through:
        return Through(target.columns, source.columns, self.z)

    def head(self) -> Through:
        return self.product(self.stream, self.region)

    def look_up(self, rows: int) -> LookUp:
        return LookUp(self.stream, self.region.columns, self.z, rows)


class Through:
    """x W^T with W [out over `gathered` and again over z, in over `summed`]."""

    def __init__(self, gathered: Axis, summed: Axis, z: Axis):
        self.gathered, self.summed, self.z = gathered, summed, z

    def forward(self, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> list[Tensor]:
        rows, matrices = Gathered(self.gathered, x), [Gathered(self.z, weight) for weight in weights]
        going = []
        for matrix, columns in zip(matrices, outputs, strict=True):
            going.append(Scattered(self.summed, rows.whole @ matrix.whole[:columns].t()))
        return [scattered.part for scattered in going]

    def backward(
        self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        above, matrices = [Gathered(self.summed, dy) for dy in dys], [Gathered(self.z, weight) for weight in weights]
        rows = Gathered(self.gathered, x)
        of_input = above[0].whole @ matrices[0].whole[: outputs[0]]
        for dy, matrix, columns in zip(above[1:], matrices[1:], outputs[1:], strict=True):
            of_input.addmm_(dy.whole, matrix.whole[:columns])
        dx = Scattered(self.gathered, of_input)
        going = []
        for dy, weight, columns in zip(above, weights, outputs, strict=True):
            dw = F.pad(dy.whole.t() @ rows.whole, (0, 0, 0, self.z.size * len(weight) - columns))
            going.append(Scattered(self.z, dw))
        return dx.part, [scattered.part for scattered in going]


class LookUp:
    """Rows of a table that lies as a weight does: each rank looks up what its rows have, for all tokens of its z."""

    def __init__(self, stream: Side, y: Axis, z: Axis, rows: int):
        self.stream, self.y, self.z, self.rows = stream, y, z, rows

    def ids(self, ids: Tensor) -> Tensor:
        """The tokens that this rank looks up, of all of a microbatch."""
        count = self.y.size * self.stream.rows_here(len(ids))
        return taken(ids, self.z.index * count, count, padding=0)

    def forward(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        local, elsewhere = places(ids, self.y.index * self.rows, self.rows, size)
        found = F.embedding(local, Gathered(self.z, table).whole[: self.rows])
        return Scattered(self.y, found.masked_fill_(elsewhere[..., None], 0.0)).part

    def backward(self, dy: Tensor, ids: Tensor, table: Tensor, size: int) -> Tensor:
        local, elsewhere = places(ids, self.y.index * self.rows, self.rows, size)
        above = Gathered(self.y, dy).whole.masked_fill(elsewhere[..., None], 0.0).flatten(0, -2)
        whole = table.new_zeros(self.z.size * len(table), table.shape[1])
        return Scattered(self.z, whole.index_add_(0, local.flatten(), above)).part


class Gathered:
    """All ranks' parts, one below the other: on their way from the start, there when asked for."""

    def __init__(self, axis: Axis, part: Tensor):
        part = part.detach().contiguous()
        self._whole = part.new_empty(axis.size * len(part), *part.shape[1:])
        self._coming: Pending | None = axis.start_all_gather(self._whole, part)

    @property
    def whole(self) -> Tensor:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return self._whole


class Scattered:
    """This rank's part of a sum over all ranks: on its way from the start, there when asked for."""

    def __init__(self, axis: Axis, whole: Tensor):
        self._part = whole.new_empty(len(whole) // axis.size, *whole.shape[1:])
        self._coming: Pending | None = axis.start_reduce_scatter(self._part, whole.contiguous())

    @property
    def part(self) -> Tensor:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return self._part
