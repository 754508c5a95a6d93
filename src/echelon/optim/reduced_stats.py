"""Parameter statistics (row sums, norms), all-reduced together: one collective per mesh axis, not per parameter.

Each rank of a stage contributes the statistics of its pieces, and all ranks get the full ones. A weight on several
stages (a tied embedding) is reduced apart from the others: its copies' all-reduces then have the same size and order on
all stages, so the copies stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.param_shards import ParamShard
from echelon.parallel.comm.mesh_axis import MeshAxis


class ReducedStats:
    """A flat tensor of statistics, `sizes[i]` of each parameter; those reduced together are consecutive."""

    def __init__(self, shards: Sequence[ParamShard], sizes: Sequence[int], device: torch.device):
        self._all_reduces: list[tuple[MeshAxis, slice]] = []
        self._slices: dict[ParamShard, slice] = {}
        buckets: dict[tuple[str, bool], list[tuple[ParamShard, int]]] = {}
        for shard, size in zip(shards, sizes, strict=True):
            buckets.setdefault((shard.axis.name, bool(shard.param.tied_pp_ranks)), []).append((shard, size))
        position = 0
        for key in sorted(buckets):
            begin = position
            for shard, size in buckets[key]:
                self._slices[shard] = slice(position, position + size)
                position += size
            self._all_reduces.append((buckets[key][0][0].axis, slice(begin, position)))
        self.size = position
        self._dtype = shards[0].update_dtype if shards else torch.float32
        self._device = device

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self._dtype, device=self._device)

    def view(self, values: Tensor, shard: ParamShard) -> Tensor:
        """View one parameter's statistics."""
        return values[self._slices[shard]]

    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        """Sum (or take the maximum) over the ranks, in place."""
        pending = [axis.start_all_reduce(values[where], op=op) for axis, where in self._all_reduces]
        for work in pending:
            work.wait()
        return values

    def collectives(self, part: str) -> list[Collective]:
        """Return the collectives of `all_reduce`."""
        return [
            Collective(
                op="all_reduce", axis=axis.name, bytes=(where.stop - where.start) * self._dtype.itemsize, purpose=part
            )
            for axis, where in self._all_reduces
            if axis.size > 1
        ]


class RowColumnStats(ReducedStats):
    """One statistic for every row and every column of the parameters' matrices."""

    def __init__(self, shards: Sequence[ParamShard], device: torch.device):
        super().__init__(shards, [shard.stack.num_row_column_stats for shard in shards], device)

    def rows_and_columns(self, values: Tensor, shard: ParamShard) -> tuple[Tensor, Tensor]:
        """View one parameter's statistics as [matrices, rows] and [matrices, columns]."""
        stack, stats = shard.stack, self.view(values, shard)
        num_rows = stack.num_matrices * stack.rows
        return stats[:num_rows].view(-1, stack.rows), stats[num_rows:].view(-1, stack.columns)

    def of_rectangle(self, values: Tensor, shard: ParamShard, rectangle: MatrixRectangle) -> tuple[Tensor, Tensor]:
        """View the statistics of a rectangle's rows and of its columns."""
        rows, columns = self.rows_and_columns(values, shard)
        matrix = rectangle.matrix_index
        return rows[matrix, slice(*rectangle.rows)], columns[matrix, slice(*rectangle.columns)]
