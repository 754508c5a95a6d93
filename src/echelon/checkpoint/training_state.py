"""What one rank holds of a training state, by logical name: parameters, the optimizer's states, averages, buffers.

    model.<parameter>               master values; what is shorter on the device follows from them
    optimizer.<kind>.<parameter>    `mean`, `square`, `momentum`, `rows`, `columns`, `step`, ... (optim/optimizer_state.py)
    average.<parameter>             of the weights
    buffer.<name>                   running statistics, biases of gates
    train.<name>                    loss scale, targets of the last step

Of what several ranks hold, one writes: every element is written once (`Piece.owner` and `Piece.first`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.checkpoint.tensor_slices import Part, Placed
from echelon.layout.placement import Piece
from echelon.optim.matrix_shards import stack_of
from echelon.optim.optimizer_protocol import Update
from echelon.optim.optimizer_state import Kept
from echelon.optim.rules.ema import Average
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.param_group import FlatUnit

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names"""


@dataclass(frozen=True)
class Item:
    """What a rank holds of one logical tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """of the logical tensor"""
    part: Part
    writes: bool
    """this rank writes it"""
    read: Callable[[], Tensor]
    """its elements, flat"""
    write: Callable[[Tensor], None]
    """sets them; padding is 0"""
    lasts: bool = True
    """what is read is the same until the next update; not so where states are on disk, and of buffers"""

    @property
    def size(self) -> int:
        return self.part.stop - self.part.start

    def placed(self) -> list[Placed]:
        return self.part.placed()


@dataclass(frozen=True)
class Number:
    """A number of the whole run, which every rank has."""

    dtype: torch.dtype
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]


class State:
    """One rank's part of a training state. All its items come in the same order every time."""

    def __init__(
        self,
        parallel: Parallel,
        optimizer: Update,
        average: Average | None = None,
        numbers: Mapping[str, Number] | None = None,
    ):
        self._parallel, self._optimizer, self._average = parallel, optimizer, average
        self._numbers = numbers or {}

    def items(self, *, changing: bool = False) -> Iterator[Item]:
        """With `changing`, everybody is told when a unit's values have been written."""
        flat = self._parallel.flat
        for unit in flat.units:
            for entry in unit.unit.entries:
                yield _parameter(unit, flat.placement.piece(unit.unit, entry))
            if changing:
                unit.updated()
        for kept in self._optimizer.kept():
            yield _state(f"optimizer.{kept.kind}", kept)
        for kept in self._average.kept() if self._average is not None else ():
            yield _state(kept.kind, kept)
        yield from self._buffers()
        first = self._parallel.axes.rank == 0
        for name, found in self._numbers.items():
            part = Part.whole(())
            yield Item(f"train.{name}", found.dtype, (), part, first, _flat(found.read), found.write, lasts=False)

    def _buffers(self) -> Iterator[Item]:
        model, at = self._parallel.model, self._parallel.axes.at
        lasting = model.state_dict(keep_vars=True).keys()
        first = all(at[axis] == 0 for axis in ("dp", "tp", "cp"))
        for name, buffer in model.named_buffers():
            if name in lasting:
                part = Part.whole(buffer.shape)
                flat, shape = partial(torch.reshape, buffer, (-1,)), tuple(buffer.shape)
                write = partial(_fill, buffer)
                yield Item(f"buffer.{name}", buffer.dtype, shape, part, first, flat, write, lasts=False)


def _parameter(unit: FlatUnit, piece: Piece) -> Item:
    where = slice(piece.shard_offset, piece.shard_offset + piece.stop - piece.start)

    def read() -> Tensor:
        return unit.master.values(where)

    @torch.no_grad()
    def write(values: Tensor) -> None:
        if len(values):
            unit.master.set(piece.shard_offset, values)

    name, entry = f"model.{piece.entry.name}", piece.entry
    return Item(name, unit.master.dtype, entry.shape, Part.of(piece), piece.owner and piece.first, read, write)


def _state(prefix: str, kept: Kept) -> Item:
    piece, name = kept.piece, f"{prefix}.{kept.piece.entry.name}"
    mine = piece.owner and piece.first
    shape, entry = piece.entry.shape, piece.entry
    if kept.form == "elements":
        lasts = getattr(kept.unit, "store", None) is None
        return Item(name, kept.dtype, shape, Part.of(piece), mine, kept.read, kept.write, lasts)
    # Of the ranks that hold parts of a matrix, the one with its first element writes what is of all of it.
    inside = piece.box if kept.form == "number" or entry.filters else piece.box[-2:]
    mine = mine and piece.start == 0 < piece.stop and all(low == 0 for low, _ in inside)
    if kept.form == "number":
        return Item(name, kept.dtype, (), Part.whole(()), mine, _flat(kept.read), kept.write)
    stack = stack_of(shape, filters=entry.filters)
    side = stack.rows if kept.form == "rows" else stack.columns
    matrices = (0, 1) if entry.filters or len(shape) < 3 else _leading(piece)
    part = Part.all_of((matrices, (0, side)))
    return Item(name, kept.dtype, (stack.matrices, side), part, mine, _flat(kept.read), kept.write)


def _leading(piece: Piece) -> tuple[int, int]:
    """Which matrices of a stack a rank's box has: only the first dimension is cut."""
    shape = piece.entry.shape
    each = math.prod(shape[1:-2])
    low, high = piece.box[0]
    return low * each, high * each


def _flat(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: read().reshape(-1)


@torch.no_grad()
def _fill(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values.view(buffer.shape))
