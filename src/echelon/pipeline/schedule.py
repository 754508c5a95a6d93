"""`Schedule`: every rank's list of actions, as data with a text form.

[Note: stage placement]

With d ranks and v chunks each, the d * v stages loop over the ranks (interleaved 1F1B), or go forth and back in a V
(two chunks, ZB-V and DualPipe-V), so that rank 0 holds the first and the last stage:

    looped    rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7
    V         rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.pipeline.actions import Action

RankActions = tuple[tuple[Action, ...], ...]
"""the actions of every rank, in order"""


def looped_placement(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of every stage, where stages loop over the ranks."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """The rank of every stage, where stages go forth and back."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every rank of a pipeline."""

    name: str
    rank_of_stage: tuple[int, ...]
    """the rank of every stage"""
    microbatches: int
    rank_actions: RankActions
    """compute, updates and weight versions; `lower.lower` adds sends and receives"""
    slices: int = 1
    """per microbatch, of its tokens"""
    note: str = ""
    """a remark for readers, such as the fallback for too few microbatches"""

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
        """A line per rank with its stages and actions: the format of `schedule=file:PATH`."""
        return "".join(
            f"rank {rank}, stages {' '.join(map(str, self.stages_on(rank)))}: {' '.join(map(str, actions))}\n"
            for rank, actions in enumerate(self.rank_actions)
        )
