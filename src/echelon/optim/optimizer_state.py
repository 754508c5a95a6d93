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
from echelon.optim.param_shards import FlatSegment, ParamShard
from echelon.optim.reduced_stats import RowColumnStats
from echelon.parallel.dp.param_group import ParamGroup

StateForm = Literal["elements", "rows", "columns", "number"]


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """One state of one parameter."""

    name: str
    """its name, e.g. `mean`"""
    param_group: ParamGroup
    piece: Piece
    form: StateForm
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """the state itself, or a copy of it"""
    write: Callable[[Tensor], None]


def element_state(name: str, param_group: ParamGroup, piece: Piece, state: Tensor) -> OptimizerState:
    """A flat state of a piece."""
    return OptimizerState(name, param_group, piece, "elements", state.dtype, lambda: state, partial(_copy, state))


def segment_states(name: str, segments: Sequence[FlatSegment], states: Sequence[Tensor]) -> Iterator[OptimizerState]:
    for run, state in zip(segments, states, strict=True):
        yield from states_of_segment(name, run, run.start, state)


def states_of_segment(name: str, segment: FlatSegment, start: int, state: Tensor) -> Iterator[OptimizerState]:
    """A state of elements of a run, the first of which is number `start` of the unit's shard."""
    for piece in segment.pieces:
        first = piece.shard_offset - start
        if 0 <= first < len(state):
            yield element_state(name, segment.param_group, piece, state[first : first + piece.stop - piece.start])


def count_state(name: str, param_group: ParamGroup, piece: Piece, state: Tensor) -> OptimizerState:
    """A count of updates, in int64 whatever it is kept in."""
    read = partial(state.to, torch.int64)
    return OptimizerState(name, param_group, piece, "number", torch.int64, read, partial(_copy, state))


def segment_counts(name: str, segments: Sequence[FlatSegment], state: Tensor) -> Iterator[OptimizerState]:
    return (count_state(name, run.param_group, piece, state) for run in segments for piece in run.pieces)


def shard_counts(name: str, shards: Sequence[ParamShard], state: Tensor) -> Iterator[OptimizerState]:
    return (count_state(name, one.param_group, one.piece, state) for one in shards)


def row_column_states(stats: RowColumnStats, shards: Sequence[ParamShard], values: Tensor) -> Iterator[OptimizerState]:
    """Numbers of rows and columns of matrices."""
    for one in shards:
        for form, state in (("rows", stats.rows(values, one)), ("columns", stats.columns(values, one))):
            yield OptimizerState(
                form,
                one.param_group,
                one.piece,
                "rows" if form == "rows" else "columns",
                state.dtype,
                partial(_identity, state),
                partial(_copy, state),
            )


def _identity(state: Tensor) -> Tensor:
    return state


@torch.no_grad()
def _copy(state: Tensor, values: Tensor) -> None:
    state.copy_(values.view(state.shape))
