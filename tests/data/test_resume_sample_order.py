"""A million samples, shuffled: stop at step 7 on dp=4, resume on another number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from cpu_clock import cpu_seconds

from echelon.data import TokenDataset, TokenWriter, rank_indices, sample_indices_of_step

SAMPLES, SEQ_LEN, BATCH, STOP = 1_000_000, 2, 12, 7


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("s9") / "million.tokens"
    with TokenWriter(path, vocab_size=1 << 20, eos=0, tokenizer="none") as writer:
        writer.write_document(
            [np.arange(SAMPLES * SEQ_LEN) // SEQ_LEN]
        )  # the first token of a sample is the sample's number
    return path


def read(path: Path, first: int, steps: int, dp: int, weights: tuple[float, ...] = ()) -> list[int]:
    """What the ranks of a run read after a start from the next sample's index alone."""
    files = [path] * max(1, len(weights))
    ranks = [TokenDataset(files, weights, SEQ_LEN, 42) for _ in range(dp)]
    seen: list[int] = []
    for step in range(steps):
        indices = range(first + step * BATCH, first + (step + 1) * BATCH)
        for rank, data in enumerate(ranks):
            seen += data.batch(np.array(rank_indices(indices, rank, dp)))["tokens"][:, 0].tolist()
    return seen


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("weights", [(), (0.7, 0.3)])
def test_stopped_and_resumed_is_uninterrupted(path: Path, dp: int, epoch: int, weights: tuple[float, ...]) -> None:
    # In later epochs, start so that the stop falls a little before the end of one: the batches cross it.
    first = max(0, epoch * SAMPLES - 5 * BATCH - 4)
    whole = read(path, first, 20, 1, weights)
    before = read(path, first, STOP, 4, weights)
    start = cpu_seconds()
    after = read(path, first + STOP * BATCH, 13, dp, weights)
    assert cpu_seconds() - start < 1
    assert before + after == whole


@pytest.mark.parametrize("dp", [2, 3])
def test_none_twice_none_lost_over_two_epochs(path: Path, dp: int) -> None:
    data = TokenDataset([path], (), SEQ_LEN, 42)
    position = STOP * BATCH
    assert position == sample_indices_of_step(STOP, BATCH).start
    parts = [np.array(rank_indices(range(position), rank, 4)) for rank in range(4)]
    rest = 2 * SAMPLES - position - (2 * SAMPLES - position) % dp
    parts += [np.array(rank_indices(range(position, position + rest), rank, dp)) for rank in range(dp)]
    parts.append(np.arange(position + rest, 2 * SAMPLES))
    place = data.locate(np.concatenate(parts))
    for epoch in (0, 1):
        assert (np.bincount(place.sample[place.epoch == epoch], minlength=SAMPLES) == 1).all()
    first, second = (place.sample[place.epoch == epoch] for epoch in (0, 1))
    assert (first != second).mean() > 0.99


def test_start_in_epoch_two_is_immediate(path: Path) -> None:
    start = cpu_seconds()
    data = TokenDataset([path], (), SEQ_LEN, 42)
    data.batch(np.arange(SAMPLES + 84, SAMPLES + 96))
    assert cpu_seconds() - start < 0.2
