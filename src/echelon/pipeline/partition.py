"""Which links of a model each stage of a pipeline gets: balanced by cost, or by hand.

[Note: the best split]

A split is good when its slowest stage is fast: every other stage waits for that one. Often several splits have the same
slowest stage, so there are three rules, one after another:

1. the largest stage's cost (or transfer between two stages, where transfers have a cost) is as small as it can be;
2. among those, the sum of the squares of the stages' costs: what the slowest stage leaves free is shared evenly;
3. among those, the last stage gets the fewest layers, then the one before it, and so on.

The first rule is a dynamic programme of its own. The second is not a tie-break inside it: the best start of a split may
be slower than another start, as long as it hides behind a slower stage that comes later. So the first pass finds the
limit, and the second finds the least squares among all splits within the limit. Costs become integers first (a float is
a fraction of integers), so equal means equal, and the answer does not depend on the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise


def balance_layers(costs: Sequence[float], stages: int, *, glue: Collection[int] = ()) -> tuple[int, ...]:
    """How many links each stage gets, by [Note: the best split]. Links i and i + 1 stay together for every i in `glue`.

    Links that stay together are one layer, and each stage gets at least one.
    """
    layers = group_into_blocks(len(costs), glue)
    check_stages(stages, len(layers))
    free = [[0.0] * len(layers)] * (stages - 1)
    found = optimal_partition([math.fsum(costs[i] for i in layer) for layer in layers], free)
    return layers_per_stage(layers, found)


def layers_to_glue(names: Sequence[str]) -> frozenset[int]:
    """The `glue` of a chain of links: every stage must have a layer, a link with a numbered name such as `blocks.3`.

    Links before the first layer (`embed`) stay with it, others (`head`) with the layer before them. Where no name is
    numbered, every link is a layer.
    """
    numbered = [name.rpartition(".")[2].isdigit() for name in names]
    if not any(numbered):
        return frozenset()
    first = numbered.index(True)
    return frozenset(i if i < first else i - 1 for i, layer in enumerate(numbered) if not layer)


def group_into_blocks(num_layers: int, glue: Collection[int]) -> tuple[range, ...]:
    """The layers of a chain: for each, the links that stay together."""
    wrong = sorted(i for i in glue if not 0 <= i < num_layers - 1)
    if wrong:
        raise ValueError(
            f"no link comes after these to stay with ({wrong} of {num_layers} links); use 0 to {num_layers - 2}"
        )
    bounds = [0, *(i + 1 for i in range(num_layers - 1) if i not in glue), num_layers]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """Which links each stage has, and where it lives."""

    layers: tuple[tuple[str, ...], ...]
    """of every stage, the names of its links, in the order of the model"""
    ranks: tuple[tuple[int, ...], ...]
    """of every stage, the pipeline's ranks that hold it: one, or several that share its microbatches (PipeDream)"""
    costs: tuple[float, ...]
    """of every stage, the cost of its links on one rank, in any unit"""

    def __post_init__(self) -> None:
        names = [name for stage in self.layers for name in stage]
        twice = sorted({name for name in names if names.count(name) > 1})
        empty = [str(stage) for stage, links in enumerate(self.layers) if not links]
        homeless = [str(stage) for stage, ranks in enumerate(self.ranks) if not ranks]
        sizes = {len(self.layers), len(self.ranks), len(self.costs)}
        faults = [f"links on two stages: {', '.join(twice)}"] if twice else []
        faults += [f"stages without a link: {', '.join(empty)}"] if empty else []
        faults += [f"stages without a rank: {', '.join(homeless)}"] if homeless else []
        faults += [f"links, ranks and costs of {sorted(sizes)} stages"] if len(sizes) > 1 else []
        if faults:
            raise ValueError(f"the split is not one ({'; '.join(faults)}); give every link to one stage")

    @classmethod
    def balanced(cls, names: Sequence[str], costs: Sequence[float], rank_of_stage: Sequence[int]) -> StageSplit:
        """The best split by the costs of the links, on the ranks of a schedule's stages."""
        _check_costs(names, costs)
        return cls.from_layer_counts(
            names,
            balance_layers(costs, len(rank_of_stage), glue=layers_to_glue(names)),
            costs,
            [(home,) for home in rank_of_stage],
        )

    @classmethod
    def from_block_counts(
        cls, names: Sequence[str], costs: Sequence[float], rank_of_stage: Sequence[int], block_counts: Sequence[int]
    ) -> StageSplit:
        """The split with these numbers of layers per stage. What is not a layer (`embed`, `head`) goes with one."""
        _check_costs(names, costs)
        groups = group_into_blocks(len(names), layers_to_glue(names))
        check_stages(len(rank_of_stage), len(groups))
        faults = (
            [f"{len(block_counts)} numbers for {len(rank_of_stage)} stages"]
            if len(block_counts) != len(rank_of_stage)
            else []
        )
        faults += ["a stage without a layer"] if any(number < 1 for number in block_counts) else []
        faults += [f"a sum of {sum(block_counts)} for {len(groups)} layers"] if sum(block_counts) != len(groups) else []
        if faults:
            raise ValueError(
                f"the layers per stage do not fit the model ({', '.join(map(str, block_counts))}: {', '.join(faults)}); "
                f"give {len(rank_of_stage)} numbers of 1 or more that sum to {len(groups)}"
            )
        return cls.from_layer_counts(
            names, layers_per_stage(groups, block_counts), costs, [(home,) for home in rank_of_stage]
        )

    @classmethod
    def from_layer_counts(
        cls, names: Sequence[str], counts: Sequence[int], costs: Sequence[float], ranks: Sequence[tuple[int, ...]]
    ) -> StageSplit:
        """The split with these numbers of links per stage, which cover the chain."""
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
        """The rank of every stage, as a schedule has it; the first one where a stage has several."""
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def blocks_per_stage(self) -> tuple[int, ...]:
        """Of every stage, its number of layers, as `by_hand` takes them."""
        names = [name for links in self.layers for name in links]
        ends = {layer[-1] for layer in group_into_blocks(len(names), layers_to_glue(names))}
        bounds = [*accumulate(map(len, self.layers), initial=0)]
        return tuple(sum(end in range(start, stop) for end in ends) for start, stop in pairwise(bounds))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, ranks in enumerate(self.ranks) if rank in ranks)

    def stage_of(self, name: str) -> int:
        """The stage that has this link."""
        return next(stage for stage, links in enumerate(self.layers) if name in links)

    def __str__(self) -> str:
        """A line per stage: where it lives, its links from the first to the last, its share of the cost."""
        total = math.fsum(self.costs)
        rows = [
            (
                f"stage {stage}",
                f"{'rank' if len(self.ranks[stage]) == 1 else 'ranks'} {_format_ranges(self.ranks[stage])}",
                links[0] if len(links) == 1 else f"{links[0]} .. {links[-1]}",
                f"{cost / total if total else 0:.1%}",
            )
            for stage, (links, cost) in enumerate(zip(self.layers, self.costs, strict=True))
        ]
        stage, rank, links_, share = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "".join(f"{a:<{stage}}  {b:<{rank}}  {c:<{links_}}  {d:>{share}}\n" for a, b, c, d in rows)


def optimal_partition(costs: Sequence[float], transfers: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """How many of the units with these costs each stage gets, by [Note: the best split].

    transfers[s][i] is what it costs to cut between stages s and s + 1 after unit i; there is one stage more than cuts.
    """
    units, stages = len(costs), len(transfers) + 1
    numbers = _to_integers([*costs, *(cost for cut in transfers for cost in cut)])
    sums = [*accumulate(numbers[:units], initial=0)]
    cuts = [numbers[units * stage : units * (stage + 1)] for stage in range(1, stages)]
    limit = _min_bottleneck(sums, cuts)

    never = sums[-1] ** 2 + 1  # more than any sum of squares
    squares = [never] + [total**2 if total <= limit else never for total in sums[1:]]
    starts: list[list[int]] = []  # of the last stage, by the number of stages before it and of units in all
    for stage, cut in enumerate(cuts, start=1):
        best, start = [never] * (units + 1), [0] * (units + 1)
        for stop in range(stage + 1, units - len(cuts) + stage + 1):  # every stage before and after gets a unit
            for i in range(stop - 1, stage - 1, -1):  # the last stage grows: a tie leaves it short
                cost = sums[stop] - sums[i]
                if cost > limit:
                    break
                if cut[i - 1] <= limit and squares[i] + cost**2 < best[stop]:
                    best[stop], start[stop] = squares[i] + cost**2, i
        squares = best
        starts.append(start)

    bounds = [units]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    bounds.append(0)
    return tuple(after - before for before, after in pairwise(reversed(bounds)))


def _min_bottleneck(sums: Sequence[int], cuts: Sequence[Sequence[int]]) -> int:
    """The least that the largest cost of a stage or a cut can be. `sums` are the costs of the first 0, 1, ... units."""
    never = sums[-1] + max((cost for cut in cuts for cost in cut), default=0) + 1
    before = [never, *sums[1:]]  # of the first i units, in as many stages as there were cuts so far
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
    """The costs times one number that makes them all whole."""
    wrong = [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise ValueError(f"a cost is not a number of 0 or more ({wrong[0]}); measure or predict it again")
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (scale // fraction.denominator) for fraction in fractions]


def layers_per_stage(blocks: Sequence[range], counts: Sequence[int]) -> tuple[int, ...]:
    """How many links so many layers are, for each stage."""
    bounds = [0, *(layer.stop for layer in blocks)]
    return tuple(bounds[stop] - bounds[start] for start, stop in pairwise(accumulate(counts, initial=0)))


def check_stages(stages: int, blocks: int) -> None:
    if not 1 <= stages <= blocks:
        raise ValueError(
            f"every stage needs a layer ({stages} stages, {blocks} layers); use 1 to {blocks} stages (pp x vpp)"
        )


def _check_costs(names: Sequence[str], costs: Sequence[float]) -> None:
    if len(names) != len(costs):
        raise ValueError(f"each link needs a cost ({len(names)} links, {len(costs)} costs); give one cost per link")


def _format_ranges(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    bounds = [i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1] + 1]
    runs = [ranks[start:stop] for start, stop in pairwise([0, *bounds, len(ranks)])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
