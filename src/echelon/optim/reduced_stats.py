"""Numbers of parameters (sums over rows, norms) that ranks put together: one message for each axis, not one for each.

The ranks of a stage that hold parts of a parameter each put in what theirs gives, and all have the whole. A weight that
several stages hold (a tied embedding) travels apart from the others: so its copies' messages are of one size on all
stages, are added in one order, and the copies stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.param_shards import ParamShard
from echelon.parallel.comm.mesh_axis import MeshAxis


class ReducedStats:
    """So many numbers of each parameter in one row, those that travel together side by side."""

    def __init__(self, shards: Sequence[ParamShard], sizes: Sequence[int]):
        self._all_reduces: list[tuple[MeshAxis, slice]] = []
        self._slices: dict[ParamShard, slice] = {}
        together: dict[tuple[str, bool], list[tuple[ParamShard, int]]] = {}
        for one, size in zip(shards, sizes, strict=True):
            together.setdefault((one.axis.name, bool(one.entry.tied_pp_ranks)), []).append((one, size))
        position = 0
        for key in sorted(together):
            begin = position
            for one, size in together[key]:
                self._slices[one] = slice(position, position + size)
                position += size
            self._all_reduces.append((together[key][0][0].axis, slice(begin, position)))
        self.size = position
        self._dtype = shards[0].update_dtype if shards else torch.float32
        self._device = shards[0].param_group.unsharded_param.device if shards else torch.device("cpu")

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self._dtype, device=self._device)

    def view(self, values: Tensor, shard: ParamShard) -> Tensor:
        """A parameter's own."""
        return values[self._slices[shard]]

    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        """Sums (or takes the maximum) over the ranks, in place."""
        started = [axis.start_all_reduce(values[place], op=op) for axis, place in self._all_reduces]
        for pending in started:
            pending.wait()
        return values

    def collectives(self, part: str) -> list[Collective]:
        """What `combine` sends."""
        return [
            Collective(
                op="all_reduce", axis=axis.name, bytes=(place.stop - place.start) * self._dtype.itemsize, purpose=part
            )
            for axis, place in self._all_reduces
            if axis.size > 1
        ]


class RowColumnStats:
    """Numbers of rows and columns of matrices."""

    def __init__(self, shards: Sequence[ParamShard]):
        self.stats = ReducedStats(shards, [one.stack.num_row_column_stats for one in shards])

    def rows(self, values: Tensor, shard: ParamShard) -> Tensor:
        """[matrices, rows]"""
        stack = shard.stack
        return self.stats.view(values, shard)[: stack.num_matrices * stack.rows].view(stack.num_matrices, stack.rows)

    def columns(self, values: Tensor, shard: ParamShard) -> Tensor:
        """[matrices, columns]"""
        stack = shard.stack
        return self.stats.view(values, shard)[stack.num_matrices * stack.rows :].view(stack.num_matrices, stack.columns)
