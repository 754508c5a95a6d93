from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import SourceBlend

COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(tuple)


@given(counts=COUNTS, start=st.integers(0, 1 << 45))
@settings(max_examples=80, deadline=None)
def test_exact_in_every_period_none_lost_none_twice(counts: tuple[int, ...], start: int) -> None:
    mixture = SourceBlend(counts=counts)
    first = start * mixture.period
    source, rank = mixture.source_and_index(np.arange(first, first + 3 * mixture.period))
    for number, count in enumerate(counts):
        # The index counts the earlier samples of the source, so the indices of a source just count up.
        assert (rank[source == number] == np.arange(start * count, (start + 3) * count)).all()


@given(counts=COUNTS)
@settings(max_examples=80, deadline=None)
def test_shares_hold_after_any_number_of_samples(counts: tuple[int, ...]) -> None:
    mixture = SourceBlend(counts=counts)
    source, _ = mixture.source_and_index(np.arange(2 * mixture.period))
    for number, count in enumerate(counts):
        served = np.cumsum(source == number)
        fair = np.arange(1, len(source) + 1) * count / mixture.period
        assert abs(served - fair).max() <= (len(counts) + 1) / 2


@given(weights=st.lists(st.floats(1, 1e3), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_any_weights_are_met_to_one_in_65536(weights: list[float]) -> None:
    mixture = SourceBlend.from_weights(weights)
    assert mixture.period <= 1 << 16
    total = sum(Fraction(repr(weight)) for weight in weights)
    for weight, count in zip(weights, mixture.counts, strict=True):
        assert abs(Fraction(count, mixture.period) - Fraction(repr(weight)) / total) < Fraction(1, 1 << 16)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((1,), (1,)), ((0.7, 0.2, 0.1), (7, 2, 1)), ((3, 2), (3, 2)), ((1 / 3, 2 / 3), (1, 2)), ((0.25, 0.25), (1, 1))],
)
def test_simple_weights_are_exact(weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert SourceBlend.from_weights(weights).counts == counts


def test_the_picture_in_the_note() -> None:
    source, rank = SourceBlend(counts=(3, 2)).source_and_index(np.arange(10))
    assert source.tolist() == [0, 1, 0, 1, 0] * 2
    assert rank.tolist() == [0, 0, 1, 1, 2, 3, 2, 4, 3, 5]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_weight(weight: float) -> None:
    with pytest.raises(ValueError, match="a weight must be positive"):
        SourceBlend.from_weights([1.0, weight])


def test_a_source_that_would_never_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight 1e-09 is too small .*at least 1/65536"):
        SourceBlend.from_weights([1.0, 1e-9])
