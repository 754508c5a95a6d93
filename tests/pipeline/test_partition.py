"""Which links each stage gets: balanced, by hand, and the text of the split."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from cpu_clock import cpu_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.pipeline.partition import StageSplit, balance_layers, group_into_blocks, layers_to_glue, optimal_partition
from echelon.pipeline.schedule import looped_placement, v_placement


def chain(layers: int) -> list[str]:
    return ["embed", *(f"blocks.{i}" for i in range(layers)), "head"]


def all_counts(units: int, stages: int):
    """Every partition of `units` into `stages` consecutive, non-empty stages."""
    for cuts in itertools.combinations(range(1, units), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, units)))


def rank_of(counts, costs, transfers):
    """What the note says of a split, smaller is better."""
    bounds = [0, *itertools.accumulate(counts)]
    parts = [sum((Fraction(cost) for cost in costs[a:b]), Fraction(0)) for a, b in itertools.pairwise(bounds)]
    cuts = [Fraction(transfers[stage][stop - 1]) for stage, stop in enumerate(bounds[1:-1])]
    return max(parts + cuts), sum(part**2 for part in parts), counts[::-1]


COSTS = st.one_of(st.integers(0, 4), st.sampled_from([0.1, 0.2, 0.3]), st.floats(0, 1e6))


@settings(deadline=None)
@given(st.data(), st.lists(COSTS, min_size=1, max_size=9))
def test_balance_matches_brute_force(data, costs):
    stages = data.draw(st.integers(1, len(costs)))
    free = [[0] * len(costs)] * (stages - 1)
    best = min(all_counts(len(costs), stages), key=lambda counts: rank_of(counts, costs, free))
    assert balance_layers(costs, stages) == best


@settings(deadline=None)
@given(st.data(), st.lists(COSTS, min_size=1, max_size=8))
def test_transfers_count(data, costs):
    stages = data.draw(st.integers(1, len(costs)))
    row = st.lists(COSTS, min_size=len(costs), max_size=len(costs))
    transfers = data.draw(st.lists(row, min_size=stages - 1, max_size=stages - 1))
    best = min(all_counts(len(costs), stages), key=lambda counts: rank_of(counts, costs, transfers))
    assert optimal_partition(costs, transfers) == best


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_glued_layers_stay_together(data, costs):
    glue = data.draw(st.sets(st.integers(0, max(0, len(costs) - 2)), max_size=len(costs) - 1))
    layers = group_into_blocks(len(costs), glue)
    assert [i for layer in layers for i in layer] == list(range(len(costs)))
    stages = data.draw(st.integers(1, len(layers)))
    counts = balance_layers(costs, stages, glue=glue)
    assert sum(counts) == len(costs)
    assert len(counts) == stages
    ends = {total - 1 for total in itertools.accumulate(counts)}
    assert ends <= {layer[-1] for layer in layers}
    merged = [sum(costs[i] for i in layer) for layer in layers]
    slowest = max(sum(costs[b - n : b]) for n, b in zip(counts, itertools.accumulate(counts), strict=True))
    assert slowest == rank_of(balance_layers(merged, stages), merged, [[0] * len(merged)] * (stages - 1))[0]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(7, 2, (4, 3)), (7, 3, (3, 2, 2)), (7, 4, (2, 2, 2, 1)), (9, 4, (3, 2, 2, 2)), (5, 5, (1, 1, 1, 1, 1))],
)
def test_surplus_layers_go_to_the_first_stages(layers, stages, expected):
    assert balance_layers([0.1] * layers, stages) == expected


def test_a_heavy_head_leaves_its_stage_few_layers():
    names, costs = chain(8), [0.0, *[1.0] * 8, 3.0]
    split = StageSplit.balanced(names, costs, looped_placement(3))
    assert split.layers[-1] == ("blocks.7", "head")
    assert split.costs == (4.0, 3.0, 4.0)


def test_the_rest_is_shared_evenly_behind_a_slow_stage():
    # The limit is 10, whatever the other four do: they are shared two and two.
    assert balance_layers([10, 1, 1, 1, 1], 3) == (1, 2, 2)


def test_two_hundred_layers_on_64_stages_are_quick():
    for costs in ([random.Random(0).random() for _ in range(200)], [1.0] * 200, [0.0] * 200):
        start = cpu_seconds()
        counts = balance_layers(costs, 64)
        assert cpu_seconds() - start < 1
        assert sum(counts) == 200


def test_far_apart_costs_do_not_overflow():
    assert balance_layers([1e300, 1e-300, 5e-324, 1e300], 2) == (2, 2)


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0])
def test_a_cost_is_a_number(cost):
    with pytest.raises(ValueError, match=r"invalid cost \(.*\); use a finite number of 0 or more"):
        balance_layers([1.0, cost], 2)


@pytest.mark.parametrize("stages", [0, 3])
def test_a_stage_needs_a_layer(stages):
    message = rf"every stage needs a layer \({stages} stages, 2 layers\); use 1 to 2 stages"
    with pytest.raises(ValueError, match=message):
        balance_layers([1, 1, 1, 1], stages, glue={0, 2})
    with pytest.raises(ValueError, match=message):
        StageSplit.balanced(chain(2), [1] * 4, looped_placement(stages))
    with pytest.raises(ValueError, match=message):
        StageSplit.from_block_counts(chain(2), [1] * 4, looped_placement(stages), [1] * stages)


def test_glue_needs_a_next_layer():
    with pytest.raises(ValueError, match=r"glue has no next layer \(\[3\] of 4 layers\); use 0 to 2"):
        balance_layers([1, 1, 1, 1], 2, glue={3})


@pytest.mark.parametrize(
    ("names", "glue"),
    [
        (["embed", "blocks.0", "blocks.1", "head"], {0, 2}),
        (["blocks.0", "blocks.1", "head"], {1}),
        (["embed", "scale", "blocks.0", "pool", "blocks.1", "norm", "head"], {0, 1, 2, 4, 5}),
        (["one", "two", "three"], set()),
        (["0", "1", "2"], set()),
        (["embed", "blocks.0", "head"], {0, 1}),
    ],
)
def test_unnumbered_layers_stay_with_a_block(names, glue):
    assert layers_to_glue(names) == glue


# -- Split ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "homes"),
    [
        (7, looped_placement(2)),
        (7, looped_placement(3)),
        (7, looped_placement(4)),
        *((9, homes) for n in (2, 3, 4) for homes in (looped_placement(n, 2), v_placement(n))),
    ],
)
def test_every_layer_is_on_one_stage(layers, homes):
    names = chain(layers)
    split = StageSplit.balanced(names, [0.2, *[1.0] * layers, 0.7], homes)
    assert [name for links in split.layers for name in links] == names
    assert all(any(name.startswith("blocks.") for name in links) for links in split.layers)
    assert split.rank_of_stage == homes
    assert split.stages == len(homes)
    assert sorted(stage for rank in set(homes) for stage in split.stages_on(rank)) == list(range(len(homes)))
    assert [split.stage_of(name) for name in names] == sorted(split.stage_of(name) for name in names)
    printed = [line.split() for line in str(split).splitlines()]
    assert [(words[1], words[3]) for words in printed] == [(str(s), str(home)) for s, home in enumerate(homes)]
    assert sum(float(words[-1].rstrip("%")) for words in printed) == pytest.approx(100, abs=0.05 * len(homes))


def test_the_text_of_a_split():
    split = StageSplit.balanced(chain(7), [0.5, *[1.0] * 7, 0.5], looped_placement(3))
    assert str(split) == (
        "stage 0  rank 0  embed .. blocks.1     31.2%\n"
        "stage 1  rank 1  blocks.2 .. blocks.4  37.5%\n"
        "stage 2  rank 2  blocks.5 .. head      31.2%\n"
    )
    two = StageSplit(layers=(("a",), ("b", "c")), ranks=((0, 1, 2, 4), (3,)), costs=(0.0, 0.0))
    assert str(two) == "stage 0  ranks 0-2,4  a       0.0%\nstage 1  rank 3       b .. c  0.0%\n"
    assert two.rank_of_stage == (0, 3)
    assert two.stages_on(4) == (0,)


def test_by_hand():
    split = StageSplit.from_block_counts(chain(7), [1.0] * 9, looped_placement(3), [1, 4, 2])
    assert split.layers == (
        ("embed", "blocks.0"),
        ("blocks.1", "blocks.2", "blocks.3", "blocks.4"),
        ("blocks.5", "blocks.6", "head"),
    )
    assert split.costs == (2.0, 4.0, 3.0)


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([3, 3, 2], r"3, 3, 2: a sum of 8 for 7 layers"),
        ([4, 3], r"4, 3: 2 numbers for 3 stages"),
        ([7, 0, 0], r"7, 0, 0: a stage without a layer"),
        ([9, -1], r"9, -1: 2 numbers for 3 stages, a stage without a layer, a sum of 8 for 7 layers"),
    ],
)
def test_invalid_block_counts_are_all_reported(layers, fault):
    message = rf"do not fit the model \({fault}\); give 3 numbers of 1 or more that sum to 7"
    with pytest.raises(ValueError, match=message):
        StageSplit.from_block_counts(chain(7), [1.0] * 9, looped_placement(3), layers)


def test_each_layer_has_a_cost():
    with pytest.raises(ValueError, match=r"each layer needs a cost \(9 layers, 7 costs\)"):
        StageSplit.balanced(chain(7), [1.0] * 7, looped_placement(2))
    with pytest.raises(ValueError, match=r"each layer needs a cost \(9 layers, 7 costs\)"):
        StageSplit.from_block_counts(chain(7), [1.0] * 7, looped_placement(2), [4, 3])


def test_a_split_gives_every_layer_to_one_stage():
    with pytest.raises(
        ValueError, match=r"layers on two stages: a; stages without a layer: 1; stages without a rank: 2"
    ):
        StageSplit(layers=(("a", "b"), (), ("a",)), ranks=((0,), (1,), ()), costs=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"layers, ranks and costs of \[1, 2\] stages"):
        StageSplit(layers=(("a",), ("b",)), ranks=((0,), (1,)), costs=(1.0,))
