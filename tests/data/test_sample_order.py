import numpy as np
import pytest
from cpu_clock import cpu_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import epoch_and_sample, rank_indices, sample_indices_of_step

SEEDS = st.integers(-(1 << 70), 1 << 70)


@given(num=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 1 << 30), stream=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_each_epoch_visits_every_sample_once(num: int, seed: int, epoch: int, stream: int) -> None:
    index = np.arange(epoch * num, (epoch + 1) * num)
    epochs, samples = epoch_and_sample(index, num_samples=num, seed=seed, stream=stream)
    assert (epochs == epoch).all()
    assert sorted(samples.tolist()) == list(range(num))


@given(num=st.integers(1, 1 << 61), seed=SEEDS, index=st.lists(st.integers(0, (1 << 62) - 1), max_size=50, unique=True))
@settings(max_examples=60, deadline=None)
def test_pure_one_by_one_and_in_any_order(num: int, seed: int, index: list[int]) -> None:
    array = np.array(index, np.int64)
    epochs, samples = epoch_and_sample(array, num_samples=num, seed=seed)
    again = epoch_and_sample(array[::-1], num_samples=num, seed=seed)
    assert (again[0][::-1] == epochs).all()
    assert (again[1][::-1] == samples).all()
    for place in range(min(5, len(index))):
        epoch, sample = epoch_and_sample(array[place : place + 1], num_samples=num, seed=seed)
        assert (epoch[0], sample[0]) == (epochs[place], samples[place])
    assert ((samples >= 0) & (samples < num)).all()
    # Two indices of one epoch never share a sample, however large the epoch.
    assert len(set(zip(epochs.tolist(), samples.tolist(), strict=True))) == len(index)


def test_order_never_changes() -> None:
    """A run that was stopped is resumed by a later release: these numbers are a file format."""
    _, samples = epoch_and_sample(np.arange(6), num_samples=1_000_000, seed=0)
    assert samples.tolist() == [443958, 105893, 2302, 792123, 802141, 157110]
    _, samples = epoch_and_sample(np.arange(10), num_samples=5, seed=7, stream=3)
    assert samples.tolist() == [2, 3, 1, 4, 0, 3, 2, 0, 1, 4]


def test_orders_differ_by_epoch_seed_and_stream() -> None:
    index = np.arange(1000)
    base = epoch_and_sample(index, num_samples=1000, seed=1)[1]
    others = [
        epoch_and_sample(index + 1000, num_samples=1000, seed=1)[1],
        epoch_and_sample(index, num_samples=1000, seed=2)[1],
        epoch_and_sample(index, num_samples=1000, seed=1, stream=1)[1],
    ]
    for other in [index, *others]:
        # Two random orders of any length agree in one place on average.
        assert (base == other).sum() < 10
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.15


def test_all_orders_of_a_tiny_set_are_about_equally_likely() -> None:
    """Three bits in a Feistel network favoured some orders of five samples by a factor of two."""
    index = np.arange(5 * 12000)
    orders = epoch_and_sample(index, num_samples=5, seed=11)[1].reshape(-1, 5)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 120
    assert ((counts - 100) ** 2 / 100).sum() < 180  # chi-squared with 119 degrees of freedom: 1 in 4000


def test_a_far_index_costs_no_more() -> None:
    start = cpu_seconds()
    epoch_and_sample(np.array([10**17]), num_samples=10**15, seed=0)
    assert cpu_seconds() - start < 0.1


def test_batches_and_ranks_tile_the_order() -> None:
    assert sample_indices_of_step(3, 12) == range(36, 48)
    for num_ranks in (1, 2, 3, 4, 6, 12):
        blocks = [list(rank_indices(range(36, 48), rank, num_ranks)) for rank in range(num_ranks)]
        assert [index for block in blocks for index in block] == list(range(36, 48))
    with pytest.raises(ValueError, match=r"must divide .*batch 10, rank 0 of 4.*; change batch or dp"):
        rank_indices(range(10), 0, 4)


@pytest.mark.parametrize("bad", [np.array([-1]), np.array([0.5]), np.array([[1]])])
def test_indices_are_checked(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="sample indices must be"):
        epoch_and_sample(bad, num_samples=3, seed=0)


def test_no_index_gives_no_sample() -> None:
    assert epoch_and_sample(np.array([], np.int64), num_samples=3, seed=0)[1].size == 0
