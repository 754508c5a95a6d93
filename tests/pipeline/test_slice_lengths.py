"""TeraPipe's slices against every way to cut a sequence."""

from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import tiny

from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.pipeline.slices.slice_lengths import choose_slice_lengths
from echelon.pipeline.slices.token_slices import OVERHEAD_TOKENS, sequence_length, slice_time_model


def cost(slices, stages, time):
    times = [time(length, sum(slices[:place])) for place, length in enumerate(slices)]
    return sum(times) + (stages - 1) * max(times)


def every_way(length, granularity):
    inner = range(granularity, length, granularity)
    for count in range(len(inner) + 1):
        for cuts in combinations(inner, count):
            edges = (0, *cuts, length)
            yield tuple(end - start for start, end in pairwise(edges))


@settings(deadline=None, max_examples=200)
@given(
    *[st.integers(1, 10), st.integers(1, 9), st.integers(1, 3)],
    *[st.integers(0, 20), st.integers(0, 5), st.integers(0, 3)],
)
def test_slice_lengths_match_brute_force(length, stages, granularity, fixed, linear, quadratic):
    def time(tokens, before):
        return fixed + linear * tokens + quadratic * tokens * (before + tokens)

    slices = choose_slice_lengths(length, stages, time, granularity)
    assert sum(slices) == length
    assert all(size % granularity == 0 for size in slices[:-1])
    assert cost(slices, stages, time) == min(cost(way, stages, time) for way in every_way(length, granularity))


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 6), st.dictionaries(st.tuples(*[st.integers(0, 7)] * 2), st.integers(0, 30)))
def test_slice_lengths_for_random_times(length, stages, table):
    def time(tokens, before):
        return table.get((tokens, before), 7)

    slices = choose_slice_lengths(length, stages, time)
    assert cost(slices, stages, time) == min(cost(way, stages, time) for way in every_way(length, 1))


def test_later_slices_are_shorter():
    """Where the context makes tokens slower, equal times need unequal lengths."""
    slices = choose_slice_lengths(2048, 8, lambda tokens, before: 100 + tokens * (1 + (before + tokens / 2) / 1024), 64)
    assert sum(slices) == 2048
    assert len(slices) > 4
    assert list(slices) == sorted(slices, reverse=True)


def test_one_stage_needs_no_slices():
    assert choose_slice_lengths(512, 1, lambda tokens, before: 10 + tokens, 8) == (512,)


def test_the_last_slice_takes_the_rest():
    assert choose_slice_lengths(10, 8, lambda tokens, before: tokens, 4) == (4, 4, 2)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_sequences_are_rejected(sizes):
    length, stages, granularity = sizes
    with pytest.raises(ValueError, match=r"nothing to slice \(length=.*\); give 1 or more of each"):
        choose_slice_lengths(length, stages, lambda tokens, before: 1.0, granularity)


def test_the_time_of_a_slice_includes_attention_to_its_own_tokens():
    """Work does not depend on the cuts: two slices take as long as one, and the fixed cost of a slice more."""
    time = slice_time_model(SimpleNamespace(config=tiny()))
    assert time(512, 0) + OVERHEAD_TOKENS == pytest.approx(time(256, 0) + time(256, 256))
    assert time(256, 256) > time(256, 0) > OVERHEAD_TOKENS + 256


def works(*shapes):
    """A microbatch for each shape, with inputs of two shapes where there are two."""
    return [
        MicrobatchInputs({str(n): torch.zeros(s) for n, s in enumerate(several)}, torch.zeros(1)) for several in shapes
    ]


def test_sequences_are_sliced_alike():
    assert sequence_length(works([(2, 8), (2, 8, 3)], [(1, 8)])) == 8
    with pytest.raises(ValueError, match=r"must be of one length \(\[4, 8\]\); pad them"):
        sequence_length(works([(2, 8)], [(2, 4)]))
    for shapes in ([(2, 8), (2, 4)], [(2, 8), (2,)]):
        with pytest.raises(ValueError, match="the tokens of the sequence as its second dimension"):
            sequence_length(works(shapes))
