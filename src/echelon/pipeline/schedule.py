"""`Schedule`: every rank's list of actions, as data with a text of its own.

[Note: stages on ranks]

With d ranks and v chunks each, the d * v stages go round the ranks (`loop`, interleaved 1F1B) or there and back
(`vee`, two chunks, ZB-V and DualPipe-V), so that the first and the last stage meet on rank 0:

    loop  rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7
    vee   rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.pipeline.actions import Action

RankActions = tuple[tuple[Action, ...], ...]
"""the actions of every rank, in its own order"""


def looped_placement(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of every stage, round and round."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """The rank of every stage, there and back."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every rank of a pipeline does, in order."""

    name: str
    rank_of_stage: tuple[int, ...]
    """the rank of every stage"""
    microbatches: int
    rank_actions: RankActions
    """compute, updates and versions; `lower.lower` adds the communication"""
    slices: int = 1
    """slices of a microbatch's tokens"""
    note: str = ""
    """what a reader should know: the fallback that was taken where there are too few microbatches"""

    @property
    def stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def ranks(self) -> int:
        return len(self.rank_actions)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, home in enumerate(self.rank_of_stage) if home == rank)

    def __str__(self) -> str:
        """A line per rank, after a line that says what stages it has: the format of `schedule=file:PATH`."""
        return "".join(
            f"rank {rank}, stages {' '.join(map(str, self.stages_on(rank)))}: {' '.join(map(str, actions))}\n"
            for rank, actions in enumerate(self.rank_actions)
        )


def freeze_actions(lists: Iterable[Sequence[Action]]) -> RankActions:
    return tuple(tuple(actions) for actions in lists)
