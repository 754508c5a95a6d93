"""PipeDream's optimizer: the layers of each stage and its number of replicas, from a profile and the bandwidth between
ranks.

[Note: PipeDream's dynamic programme]

Ranks are joined in levels: level 1 joins m_1 ranks (a node), level 2 joins m_2 of those (a cluster), and so on; between
two components of level k the bandwidth is B_k. With T_l the seconds of layer l for a microbatch (forward and backward),
a_l the bytes of its output and w_l the bytes of its weights:

    one rank runs layers i to j:
        A_0(i..j) = sum of T_l
    one stage of level k on m components, which take turns with the microbatches and all-reduce gradients:
        T_k(i..j, m) = max(A_{k-1}(i..j, m_{k-1}), 2 (m - 1) sum of w_l / B_k) / m
    the best pipeline of m components is one stage, or it ends with layers s+1 to j on m' components:
        A_k(i..j, m) = min(T_k(i..j, m), min over s, m' of max(A_k(i..s, m - m'), 2 a_s / B_k, T_k(s+1..j, m')))

A stage of level k is itself a pipeline of level k - 1, so the stages of the result are those of level 1, each on as
many ranks as the product of its replicas over all levels. All ranks are used. Transfers and compute overlap, so the
slowest stage or transfer sets the pace. Each replica of the first stage admits ceil(ranks / its replicas) microbatches
before it waits for one to come back: enough to keep all ranks busy (PipeDream's NOAM).

It takes sum over levels of layers^3 x m_k^2 steps; the outermost level needs only the pipelines that begin with the
first layer, so layers^2 x m^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.pipeline import partition
from echelon.pipeline.layer_profile import PipelineProfile
from echelon.pipeline.partition import StageSplit
from echelon.pipeline.schedule import looped_placement

RangeTable = NDArray[np.float64]
"""a number for every first and last block"""


@dataclass(frozen=True, kw_only=True)
class NetworkLevel:
    """Components joined by links of one bandwidth: the ranks of a node, the nodes of a cluster."""

    components: int
    bandwidth: float
    """bytes per second between two of them"""

    def __post_init__(self) -> None:
        if self.components < 1:
            raise ValueError(f"a level has no components ({self.components}); give 1 or more")
        _check_bandwidth(self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class ReplicatedPipeline:
    """The stages that PipeDream's optimizer chose, and their predicted pace."""

    split: StageSplit
    seconds: float
    """per microbatch: of the slowest stage (divided by its replicas) or transfer"""

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(len(ranks) for ranks in self.split.ranks)

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have equally many replicas, as dp gives them: a layout can run no other pipeline."""
        return len(set(self.replicas)) == 1

    @property
    def in_flight(self) -> int:
        """The microbatches in flight per replica of the first stage that keep all ranks busy: PipeDream's NOAM."""
        return -(-sum(self.replicas) // self.replicas[0])

    def __str__(self) -> str:
        each = " per replica of stage 0" if self.replicas[0] > 1 else ""
        text = f"{self.split}{self.in_flight} microbatches in flight{each}, one done every {self.seconds:.3g} s\n"
        return text if self.is_uniform else f"{text}plan only: no layout puts stages on different numbers of ranks\n"


def split_by_profile(
    profile: PipelineProfile,
    stages: int,
    bandwidth: float | Sequence[float],
    *,
    rank_of_stage: Sequence[int] | None = None,
) -> StageSplit:
    """Split into stages of one rank each by [Note: PipeDream's dynamic programme]; ties by [Note: the best split].

    `bandwidth` is that of all links between ranks, or one number for each pair of consecutive stages. Stages are on
    ranks 0, 1, 2, ... or on `rank_of_stage`; two stages of one rank transfer nothing.
    """
    rank_of_stage = looped_placement(stages) if rank_of_stage is None else rank_of_stage
    speeds = [bandwidth] * (stages - 1) if isinstance(bandwidth, int | float) else list(bandwidth)
    blocks = partition.group_into_blocks(len(profile.links), partition.layers_to_glue(profile.names))
    partition.check_stages(stages, len(blocks))
    if len(rank_of_stage) != stages or len(speeds) != stages - 1:
        raise ValueError(
            f"rank_of_stage and bandwidths do not fit the stages ({stages} stages, {len(rank_of_stage)} ranks, "
            f"{len(speeds)} bandwidths); give {stages} ranks and {stages - 1} bandwidths"
        )
    for speed in speeds:
        _check_bandwidth(speed)
    costs = _BlockCosts(profile, blocks)
    transfers = [
        [0.0 if rank == next_rank else 2 * size / speed for size in costs.activation_bytes]
        for rank, next_rank, speed in zip(rank_of_stage, rank_of_stage[1:], speeds, strict=False)
    ]
    counts = partition.layers_per_stage(blocks, partition.optimal_partition(costs.seconds, transfers))
    ranks = [(rank,) for rank in rank_of_stage]
    return StageSplit.from_layer_counts(profile.names, counts, profile.layer_seconds, ranks)


def replicate(profile: PipelineProfile, levels: Sequence[NetworkLevel]) -> ReplicatedPipeline:
    """Choose the layers and the replicas of each stage by [Note: PipeDream's dynamic programme].

    Levels go from the inside out. Ties prefer one stage; else the fewest replicas of the last stage, then its fewest
    layers.
    """
    if not levels:
        raise ValueError("a pipeline needs ranks (no levels); give one level or more")
    blocks = partition.group_into_blocks(len(profile.links), partition.layers_to_glue(profile.names))
    costs = _BlockCosts(profile, blocks)
    best, solved = _range_sums(costs.seconds, empty=math.inf), []
    for number, level in enumerate(levels, start=1):
        solved.append(_LevelSolution(level, best, costs, only_first=number == len(levels)))
        best = solved[-1].best
    stages = _backtrack(solved, 0, len(blocks) - 1)
    counts = partition.layers_per_stage(blocks, [len(stage) for stage, _ in stages])
    split = StageSplit.from_layer_counts(profile.names, counts, profile.layer_seconds, [ranks for _, ranks in stages])
    return ReplicatedPipeline(split=split, seconds=float(best[0, -1]))


class _BlockCosts:
    """The time and the bytes of each block of layers."""

    def __init__(self, profile: PipelineProfile, blocks: Sequence[range]) -> None:
        self.seconds = [math.fsum(profile.layer_seconds[i] for i in block) for block in blocks]
        self.parameter_bytes = [sum(profile.links[i].parameter_bytes for i in block) for block in blocks]
        self.activation_bytes = [profile.links[block[-1]].activation_bytes for block in blocks]


class _LevelSolution:
    """A level's best pipelines for every first and last block: their pace, and where they are cut."""

    def __init__(
        self, level: NetworkLevel, component_times: RangeTable, blocks: _BlockCosts, *, only_first: bool
    ) -> None:
        """`component_times` is A_{k-1}. With `only_first`, only for the first layer of all."""
        self.components, last = level.components, len(component_times) - 1
        shared = 2 * _range_sums(blocks.parameter_bytes, empty=0) / level.bandwidth
        sent = 2 * np.array(blocks.activation_bytes, dtype=np.float64) / level.bandwidth
        sizes = range(1, level.components + 1)
        stage = [np.maximum(component_times, (m - 1) * shared) / m for m in sizes]  # T_k
        best = [table.copy() for table in stage]  # A_k
        self.last_stage_start = np.tile(np.arange(last + 1)[:, None], (level.components + 1, 1, last + 1))
        """by the number of components, the first and the last block: where the last stage begins"""
        self.replicas = np.tile(np.arange(level.components + 1)[:, None, None], (1, last + 1, last + 1))
        """and on how many components it is"""
        for m in range(2, level.components + 1):
            for replicas in range(1, m):
                for i in range(min(last, 1) if only_first else last):
                    # Rows: the last layer before the cut, from last - 1 down to i. Columns: the last layer of all.
                    before = np.maximum(best[m - replicas - 1][i, i:last], sent[i:last])[::-1]
                    paces = np.maximum(before[:, None], stage[replicas - 1][i + 1 :, i + 1 :][::-1])
                    row = paces.argmin(axis=0)
                    pace = paces[row, np.arange(last - i)]
                    better = i + 1 + np.flatnonzero(pace < best[m - 1][i, i + 1 :])
                    best[m - 1][i, better] = pace[better - i - 1]
                    self.last_stage_start[m, i, better] = last - row[better - i - 1]
                    self.replicas[m, i, better] = replicas
        self.best = best[-1]
        """A_k with all components"""


def _backtrack(levels: Sequence[_LevelSolution], first: int, last: int) -> list[tuple[range, tuple[int, ...]]]:
    """The blocks and the ranks of every stage of the best pipeline from block `first` to `last`."""
    if not levels:
        return [(range(first, last + 1), (0,))]
    *inside, level = levels
    size = math.prod(level_solution.components for level_solution in inside)
    stages: list[tuple[range, tuple[int, ...]]] = []
    left = level.components
    while left:
        begin, replicas = int(level.last_stage_start[left, first, last]), int(level.replicas[left, first, last])
        places = range(left - replicas, left)
        parts = _backtrack(inside, begin, last)
        stages[:0] = [(part, tuple(size * place + rank for place in places for rank in ranks)) for part, ranks in parts]
        last, left = begin - 1, left - replicas
    return stages


def _range_sums(values: Sequence[float], *, empty: float) -> RangeTable:
    """The sum from every first to every last block; `empty` where the last precedes the first."""
    sums = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
    table: RangeTable = sums[None, 1:] - sums[:-1, None]
    table[np.tril_indices(len(values), -1)] = empty
    return table


def _check_bandwidth(bandwidth: float) -> None:
    if not bandwidth > 0:
        raise ValueError(f"a bandwidth is not above 0 ({bandwidth}); give bytes per second")
