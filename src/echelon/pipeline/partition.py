"""The layers of each pipeline stage: balanced by cost, or as the user says.

A layer is one of the model's `PipelineLayer`s; a block is a layer with a numbered name (`blocks.3`) and the unnumbered
layers that stay with it (`embed`, `head`). Every stage gets at least one block.

[Note: the best split]

The slowest stage sets the pace. Often several splits have the same slowest stage, so there are three rules:

1. minimize the largest cost of a stage (or of a transfer between two stages, where transfers have a cost);
2. among those splits, minimize the sum of the squares of the stages' costs, which balances the other stages;
3. among those, give the last stage the fewest blocks, then the one before it, and so on.

The first rule is a dynamic programme of its own. The second is not a tie-break inside it: the best beginning of a split
may be slower than another one, as long as a later stage is slower still. So the first pass finds the limit, and the
second the least squares among all splits within it. Costs become integers first (a float is a fraction of integers), so
that ties are exact and the result does not depend on the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise


def balance_layers(costs: Sequence[float], stages: int, *, glue: Collection[int] = ()) -> tuple[int, ...]:
    """The number of layers of each stage, by [Note: the best split].

    Layers i and i + 1 stay in one block for every i in `glue`.
    """
    blocks = group_into_blocks(len(costs), glue)
    check_stages(stages, len(blocks))
    free_transfers = [[0.0] * len(blocks)] * (stages - 1)
    block_counts = optimal_partition([math.fsum(costs[i] for i in block) for block in blocks], free_transfers)
    return layers_per_stage(blocks, block_counts)


def layers_to_glue(names: Sequence[str]) -> frozenset[int]:
    """The `glue` of a model's layers: those before the first numbered one stay with it, others with the one before.

    If no name is numbered, every layer is a block.
    """
    numbered = [name.rpartition(".")[2].isdigit() for name in names]
    if not any(numbered):
        return frozenset()
    first = numbered.index(True)
    return frozenset(i if i < first else i - 1 for i, is_block in enumerate(numbered) if not is_block)


def group_into_blocks(num_layers: int, glue: Collection[int]) -> tuple[range, ...]:
    """The layers of each block."""
    wrong = sorted(i for i in glue if not 0 <= i < num_layers - 1)
    if wrong:
        raise ValueError(f"glue has no next layer ({wrong} of {num_layers} layers); use 0 to {num_layers - 2}")
    bounds = [0, *(i + 1 for i in range(num_layers - 1) if i not in glue), num_layers]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """The layers and the ranks of every stage."""

    layers: tuple[tuple[str, ...], ...]
    """the layer names of every stage, in the order of the model"""
    ranks: tuple[tuple[int, ...], ...]
    """the pp ranks of every stage: one, or several that share its microbatches (PipeDream)"""
    costs: tuple[float, ...]
    """the cost of every stage on one rank, in any unit"""

    def __post_init__(self) -> None:
        names = [name for stage in self.layers for name in stage]
        twice = sorted({name for name in names if names.count(name) > 1})
        empty = [str(stage) for stage, layers in enumerate(self.layers) if not layers]
        unplaced = [str(stage) for stage, ranks in enumerate(self.ranks) if not ranks]
        sizes = {len(self.layers), len(self.ranks), len(self.costs)}
        errors = [f"layers on two stages: {', '.join(twice)}"] if twice else []
        errors += [f"stages without a layer: {', '.join(empty)}"] if empty else []
        errors += [f"stages without a rank: {', '.join(unplaced)}"] if unplaced else []
        errors += [f"layers, ranks and costs of {sorted(sizes)} stages"] if len(sizes) > 1 else []
        if errors:
            raise ValueError(f"invalid split ({'; '.join(errors)}); give every layer to one stage")

    @classmethod
    def balanced(cls, names: Sequence[str], costs: Sequence[float], rank_of_stage: Sequence[int]) -> StageSplit:
        """The best split by the costs of the layers."""
        _check_costs(names, costs)
        counts = balance_layers(costs, len(rank_of_stage), glue=layers_to_glue(names))
        return cls.from_layer_counts(names, counts, costs, [(rank,) for rank in rank_of_stage])

    @classmethod
    def from_block_counts(
        cls, names: Sequence[str], costs: Sequence[float], rank_of_stage: Sequence[int], block_counts: Sequence[int]
    ) -> StageSplit:
        """The split with these numbers of blocks per stage."""
        _check_costs(names, costs)
        blocks = group_into_blocks(len(names), layers_to_glue(names))
        check_stages(len(rank_of_stage), len(blocks))
        stages, total = len(rank_of_stage), sum(block_counts)
        errors = [f"{len(block_counts)} numbers for {stages} stages"] if len(block_counts) != stages else []
        errors += ["a stage without a layer"] if any(number < 1 for number in block_counts) else []
        errors += [f"a sum of {total} for {len(blocks)} layers"] if total != len(blocks) else []
        if errors:
            raise ValueError(
                f"layers per stage do not fit the model ({', '.join(map(str, block_counts))}: {', '.join(errors)}); "
                f"give {stages} numbers of 1 or more that sum to {len(blocks)}"
            )
        counts = layers_per_stage(blocks, block_counts)
        return cls.from_layer_counts(names, counts, costs, [(rank,) for rank in rank_of_stage])

    @classmethod
    def from_layer_counts(
        cls, names: Sequence[str], counts: Sequence[int], costs: Sequence[float], ranks: Sequence[tuple[int, ...]]
    ) -> StageSplit:
        """The split with these numbers of layers per stage, which add up to all layers."""
        assert sum(counts) == len(names) == len(costs)
        pieces = [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
        return cls(
            layers=tuple(tuple(names[piece]) for piece in pieces),
            ranks=tuple(ranks),
            costs=tuple(math.fsum(costs[piece]) for piece in pieces),
        )

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of every stage; the first one where a stage has several."""
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def blocks_per_stage(self) -> tuple[int, ...]:
        """The number of blocks of every stage, as `from_block_counts` takes them."""
        names = [name for layers in self.layers for name in layers]
        ends = {block[-1] for block in group_into_blocks(len(names), layers_to_glue(names))}
        bounds = [*accumulate(map(len, self.layers), initial=0)]
        return tuple(sum(end in range(start, stop) for end in ends) for start, stop in pairwise(bounds))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, ranks in enumerate(self.ranks) if rank in ranks)

    def stage_of(self, name: str) -> int:
        """The stage of a layer."""
        return next(stage for stage, layers in enumerate(self.layers) if name in layers)

    def __str__(self) -> str:
        """A line per stage: its ranks, its first and last layer, its share of the cost."""
        total = math.fsum(self.costs)
        rows = [
            (
                f"stage {stage}",
                f"{'rank' if len(self.ranks[stage]) == 1 else 'ranks'} {_format_ranges(self.ranks[stage])}",
                layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}",
                f"{cost / total if total else 0:.1%}",
            )
            for stage, (layers, cost) in enumerate(zip(self.layers, self.costs, strict=True))
        ]
        stage, rank, layers_, share = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "".join(f"{a:<{stage}}  {b:<{rank}}  {c:<{layers_}}  {d:>{share}}\n" for a, b, c, d in rows)


def optimal_partition(costs: Sequence[float], transfers: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The number of blocks of each stage, from the costs of the blocks, by [Note: the best split].

    transfers[s][i] is the cost of a transfer between stages s and s + 1 that are cut after block i.
    """
    blocks, stages = len(costs), len(transfers) + 1
    numbers = _to_integers([*costs, *(cost for cut in transfers for cost in cut)])
    sums = [*accumulate(numbers[:blocks], initial=0)]
    cuts = [numbers[blocks * stage : blocks * (stage + 1)] for stage in range(1, stages)]
    limit = _min_bottleneck(sums, cuts)

    never = sums[-1] ** 2 + 1  # more than any sum of squares
    squares = [never] + [total**2 if total <= limit else never for total in sums[1:]]
    starts: list[list[int]] = []  # of the last stage, by the number of stages before it and of blocks in all
    for stage, cut in enumerate(cuts, start=1):
        best, start = [never] * (blocks + 1), [0] * (blocks + 1)
        for stop in range(stage + 1, blocks - len(cuts) + stage + 1):  # every stage before and after gets a block
            for i in range(stop - 1, stage - 1, -1):  # the last stage grows: a tie keeps it short
                cost = sums[stop] - sums[i]
                if cost > limit:
                    break
                if cut[i - 1] <= limit and squares[i] + cost**2 < best[stop]:
                    best[stop], start[stop] = squares[i] + cost**2, i
        squares = best
        starts.append(start)

    bounds = [blocks]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    bounds.append(0)
    return tuple(after - before for before, after in pairwise(reversed(bounds)))


def _min_bottleneck(sums: Sequence[int], cuts: Sequence[Sequence[int]]) -> int:
    """The least possible largest cost of a stage or a cut. `sums` are the costs of the first 0, 1, ... blocks."""
    never = sums[-1] + max((cost for cut in cuts for cost in cut), default=0) + 1
    before = [never, *sums[1:]]  # of the first i blocks, in as many stages as there were cuts so far
    for stage, cut in enumerate(cuts, start=1):
        best = [never] * len(sums)
        for stop in range(stage + 1, len(sums) - len(cuts) + stage):
            for i in range(stop - 1, stage - 1, -1):
                cost = sums[stop] - sums[i]
                if cost >= best[stop]:  # the stage only grows from here
                    break
                best[stop] = min(best[stop], max(before[i], cut[i - 1], cost))
        before = best
    return before[-1]


def _to_integers(costs: Sequence[float]) -> list[int]:
    """The costs times one number that makes them all integers."""
    wrong = [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise ValueError(f"invalid cost ({wrong[0]}); use a finite number of 0 or more")
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (scale // fraction.denominator) for fraction in fractions]


def layers_per_stage(blocks: Sequence[range], counts: Sequence[int]) -> tuple[int, ...]:
    """The number of layers of each stage, from its number of blocks."""
    bounds = [0, *(block.stop for block in blocks)]
    return tuple(bounds[stop] - bounds[start] for start, stop in pairwise(accumulate(counts, initial=0)))


def check_stages(stages: int, blocks: int) -> None:
    if not 1 <= stages <= blocks:
        raise ValueError(
            f"every stage needs a layer ({stages} stages, {blocks} layers); use 1 to {blocks} stages (pp x vpp)"
        )


def _check_costs(names: Sequence[str], costs: Sequence[float]) -> None:
    if len(names) != len(costs):
        raise ValueError(f"each layer needs a cost ({len(names)} layers, {len(costs)} costs); give one cost per layer")


def _format_ranges(ranks: Sequence[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    bounds = [i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1] + 1]
    runs = [ranks[start:stop] for start, stop in pairwise([0, *bounds, len(ranks)])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
