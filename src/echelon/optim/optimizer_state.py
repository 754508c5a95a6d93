"""Named optimizer states: a checkpoint's view of what an optimizer keeps from step to step.

A state has one of four forms. Most have one value per element of a parameter and are sharded as it is. Adafactor and
SM3 keep statistics of full rows and columns, on every rank that holds a part of the matrix. Step counts are scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from echelon.layout.placement import Piece
from echelon.parallel.dp.param_group import ParamGroup

if TYPE_CHECKING:
    from echelon.optim.flat_segments import FlatSegment
    from echelon.optim.param_shards import ParamShard
    from echelon.optim.reduced_stats import RowColumnStats

StateForm = Literal["elements", "rows", "columns", "number"]


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """One state of one parameter."""

    name: str
    """as in checkpoints, e.g. `mean`"""
    param_group: ParamGroup
    piece: Piece
    form: StateForm
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """returns the state itself, or a copy of it"""
    write: Callable[[Tensor], None]


def element_state(name: str, param_group: ParamGroup, piece: Piece, state: Tensor) -> OptimizerState:
    """Return the flat, elementwise state of a piece."""
    return OptimizerState(name, param_group, piece, "elements", state.dtype, lambda: state, partial(_copy, state))


def segment_states(name: str, segments: Sequence[FlatSegment], states: Sequence[Tensor]) -> Iterator[OptimizerState]:
    """Yield the states of all parameters in segments."""
    for segment, state in zip(segments, states, strict=True):
        yield from states_of_segment(name, segment, segment.start, state)


def states_of_segment(name: str, segment: FlatSegment, start: int, state: Tensor) -> Iterator[OptimizerState]:
    """Yield the states of a segment's parameters; `state` starts at element `start` of the group's shard."""
    for piece in segment.pieces:
        first = piece.shard_offset - start
        if 0 <= first < len(state):
            yield element_state(name, segment.param_group, piece, state[first : first + piece.stop - piece.start])


def count_state(name: str, param_group: ParamGroup, piece: Piece, state: Tensor) -> OptimizerState:
    """Return a step count, as int64 whatever its dtype."""
    read = partial(state.to, torch.int64)
    return OptimizerState(name, param_group, piece, "number", torch.int64, read, partial(_copy, state))


def segment_counts(name: str, segments: Sequence[FlatSegment], state: Tensor) -> Iterator[OptimizerState]:
    """Yield one step count for all parameters in segments."""
    return (count_state(name, segment.param_group, piece, state) for segment in segments for piece in segment.pieces)


def shard_counts(name: str, shards: Sequence[ParamShard], state: Tensor) -> Iterator[OptimizerState]:
    """Yield one step count for all shards."""
    return (count_state(name, shard.param_group, shard.piece, state) for shard in shards)


def row_column_states(stats: RowColumnStats, shards: Sequence[ParamShard], values: Tensor) -> Iterator[OptimizerState]:
    """Yield the row and column statistics of all shards."""
    forms: tuple[StateForm, StateForm] = ("rows", "columns")
    for shard in shards:
        for form, state in zip(forms, stats.rows_and_columns(values, shard), strict=True):
            read, write = partial(torch.detach, state), partial(_copy, state)
            yield OptimizerState(form, shard.param_group, shard.piece, form, state.dtype, read, write)


@torch.no_grad()
def _copy(state: Tensor, values: Tensor) -> None:
    state.copy_(values.view(state.shape))
