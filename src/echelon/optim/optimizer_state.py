"""What an update keeps from step to step, by name: a checkpoint's view of it.

Four forms. Most states have a number for each element of a parameter and are cut as it is. Adafactor and SM3 keep
numbers of whole rows and columns, on every rank that holds a part of the matrix. Counts of updates are one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from echelon.layout.placement import Piece
from echelon.optim.param_shards import Held, Run
from echelon.optim.reduced_stats import Sides
from echelon.parallel.dp.param_group import FlatUnit

Form = Literal["elements", "rows", "columns", "number"]


@dataclass(frozen=True, eq=False)
class Kept:
    """One state of one parameter."""

    kind: str
    """its name, e.g. `mean`"""
    unit: FlatUnit
    piece: Piece
    form: Form
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """the state itself, or a copy of it"""
    write: Callable[[Tensor], None]


def elements(kind: str, unit: FlatUnit, piece: Piece, state: Tensor) -> Kept:
    """A flat state of a piece."""
    return Kept(kind, unit, piece, "elements", state.dtype, lambda: state, partial(_copy, state))


def of_runs(kind: str, runs: Sequence[Run], states: Sequence[Tensor]) -> Iterator[Kept]:
    for run, state in zip(runs, states, strict=True):
        yield from of_run(kind, run, run.start, state)


def of_run(kind: str, run: Run, start: int, state: Tensor) -> Iterator[Kept]:
    """A state of elements of a run, the first of which is number `start` of the unit's shard."""
    for piece in run.pieces:
        first = piece.shard_offset - start
        if 0 <= first < len(state):
            yield elements(kind, run.unit, piece, state[first : first + piece.stop - piece.start])


def number(kind: str, unit: FlatUnit, piece: Piece, state: Tensor) -> Kept:
    """A count of updates, in int64 whatever it is kept in."""
    read = partial(state.to, torch.int64)
    return Kept(kind, unit, piece, "number", torch.int64, read, partial(_copy, state))


def number_of_runs(kind: str, runs: Sequence[Run], state: Tensor) -> Iterator[Kept]:
    return (number(kind, run.unit, piece, state) for run in runs for piece in run.pieces)


def number_of_held(kind: str, held: Sequence[Held], state: Tensor) -> Iterator[Kept]:
    return (number(kind, one.unit, one.piece, state) for one in held)


def of_sides(sides: Sides, held: Sequence[Held], numbers: Tensor) -> Iterator[Kept]:
    """Numbers of rows and columns of matrices."""
    for one in held:
        for form, state in (("rows", sides.rows(numbers, one)), ("columns", sides.columns(numbers, one))):
            yield Kept(
                form,
                one.unit,
                one.piece,
                "rows" if form == "rows" else "columns",
                state.dtype,
                partial(_same, state),
                partial(_copy, state),
            )


def _same(state: Tensor) -> Tensor:
    return state


@torch.no_grad()
def _copy(state: Tensor, values: Tensor) -> None:
    state.copy_(values.view(state.shape))
