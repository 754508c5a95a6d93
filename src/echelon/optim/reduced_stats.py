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
from echelon.optim.param_shards import Held
from echelon.parallel.comm.mesh_axis import Axis


class Shared:
    """So many numbers of each parameter in one row, those that travel together side by side."""

    def __init__(self, held: Sequence[Held], sizes: Sequence[int]):
        self._messages: list[tuple[Axis, slice]] = []
        self._places: dict[Held, slice] = {}
        together: dict[tuple[str, bool], list[tuple[Held, int]]] = {}
        for one, size in zip(held, sizes, strict=True):
            together.setdefault((one.axis.name, bool(one.entry.holders)), []).append((one, size))
        position = 0
        for key in sorted(together):
            begin = position
            for one, size in together[key]:
                self._places[one] = slice(position, position + size)
                position += size
            self._messages.append((together[key][0][0].axis, slice(begin, position)))
        self.size = position
        self._like = held[0].exact if held else torch.float32
        self._device = held[0].unit.full.device if held else torch.device("cpu")

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self._like, device=self._device)

    def of(self, numbers: Tensor, held: Held) -> Tensor:
        """A parameter's own."""
        return numbers[self._places[held]]

    def combine(self, numbers: Tensor, op: str = "sum") -> Tensor:
        """Sums (or takes the maximum) over the ranks, in place."""
        started = [axis.start_all_reduce(numbers[place], op=op) for axis, place in self._messages]
        for pending in started:
            pending.wait()
        return numbers

    def collectives(self, part: str) -> list[Collective]:
        """What `combine` sends."""
        return [
            Collective(
                kind="all_reduce", axis=axis.name, bytes=(place.stop - place.start) * self._like.itemsize, part=part
            )
            for axis, place in self._messages
            if axis.size > 1
        ]


class Sides:
    """Numbers of rows and columns of matrices."""

    def __init__(self, held: Sequence[Held]):
        self.shared = Shared(held, [one.stack.sides for one in held])

    def rows(self, numbers: Tensor, held: Held) -> Tensor:
        """[matrices, rows]"""
        stack = held.stack
        return self.shared.of(numbers, held)[: stack.matrices * stack.rows].view(stack.matrices, stack.rows)

    def columns(self, numbers: Tensor, held: Held) -> Tensor:
        """[matrices, columns]"""
        stack = held.stack
        return self.shared.of(numbers, held)[stack.matrices * stack.rows :].view(stack.matrices, stack.columns)
