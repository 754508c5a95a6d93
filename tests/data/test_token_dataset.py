from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.data import NO_TARGET, TokenDataset
from echelon.layout.validation_error import ValidationError

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def test_a_batch_is_a_window_of_the_stream_and_the_next_token(write) -> None:
    file = write([[1, 2, 3], [4, 5, 6, 7, 8]])  # 1 2 3 E 4 5 6 7 8 E
    data = TokenDataset([file.path], (), 4, 0)
    assert data.num_train == 3
    batch = data.batch(np.arange(3))
    rows = {tuple(row): tuple(target) for row, target in zip(batch["tokens"], batch["targets"], strict=True)}
    end, none = 256, NO_TARGET
    assert rows == {
        (1, 2, 3, end): (2, 3, end, 4),
        (4, 5, 6, 7): (5, 6, 7, 8),
        (8, end, end, end): (end, none, none, none),
    }
    assert set(batch) == {"tokens", "targets"}
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in batch.values())


def test_masked_documents(write) -> None:
    file = write([[1, 2, 3], [4], [5, 6, 7, 8, 9]])  # 1 2 3 E 4 E 5 6 | 7 8 9 E
    data = TokenDataset([file.path], (), 8, 0, mask_documents=True)
    batch = data.batch(np.arange(2))
    order = np.argsort(batch["tokens"][:, 0])
    end, none = 256, NO_TARGET
    assert batch["tokens"][order].tolist() == [[1, 2, 3, end, 4, end, 5, 6], [7, 8, 9, end, end, end, end, end]]
    assert batch["targets"][order].tolist() == [[2, 3, end, none, end, none, 6, 7], [8, 9, end] + [none] * 5]
    assert batch["documents"][order].tolist() == [[0, 0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    seq_len=st.integers(1, 33),
    mask=st.booleans(),
    epoch=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
def test_every_token_is_a_target_once_an_epoch(write, lengths: list[int], seq_len: int, mask: bool, epoch: int) -> None:
    file = write(lengths)
    data = TokenDataset([file.path], (), seq_len, 3, mask_documents=mask)
    indices = np.arange(epoch * data.num_train, (epoch + 1) * data.num_train)
    batch, place = data.batch(indices), data.locate(indices)
    position = place.sample[:, None] * seq_len + np.arange(seq_len)
    has_target = batch["targets"] != NO_TARGET
    # Reported a second way: position p predicts p + 1, unless that is no token, or the first of another document.
    expected = set(range(1, len(file.tokens))) - (set(file.offsets.tolist()) if mask else set())
    assert sorted((position[has_target] + 1).tolist()) == sorted(expected)
    assert (batch["targets"][has_target] == file.tokens[position[has_target] + 1]).all()
    inside = position < len(file.tokens)
    assert (batch["tokens"][inside] == file.tokens[position[inside]]).all()
    if mask:
        document = np.searchsorted(file.offsets, position, side="right") - 1
        document[~inside] = len(file.offsets)
        assert (batch["documents"] == document - document[:, :1]).all()


def test_several_files_without_weights_are_one_source(write) -> None:
    files = [write([n], name=f"{n}.tokens") for n in (100, 37, 250)]
    data = TokenDataset([file.path for file in files], (), 10, 1)
    assert data.num_train == 10 + 4 + 25
    for epoch in range(3):
        place = data.locate(np.arange(epoch * 39, (epoch + 1) * 39))
        assert (place.epoch == epoch).all()
        assert sorted(zip(place.file.tolist(), place.sample.tolist(), strict=True)) == (
            [(0, s) for s in range(10)] + [(1, s) for s in range(4)] + [(2, s) for s in range(25)]
        )


def test_weights(write) -> None:
    files = [write([n], name=f"{n}.tokens").path for n in (100, 400)]
    data = TokenDataset(files, (3, 1), 10, 1)
    place = data.locate(np.arange(4000))
    assert (place.file == 0).sum() == 3000
    for number, num_samples in enumerate((10, 40)):
        # Each file goes through epochs of its own, every sample once in each.
        seen = place.sample[place.file == number].reshape(-1, num_samples)
        assert (np.sort(seen, axis=1) == np.arange(num_samples)).all()
        assert (place.epoch[place.file == number].reshape(-1, num_samples) == np.arange(len(seen))[:, None]).all()
    assert ("shares", "3/4, 1/4", "data.weights as samples of each file in a period") in data.describe()


def test_one_file_has_one_order_with_and_without_a_weight(write) -> None:
    path = write([500]).path
    index = np.arange(200)
    plain, weighted = TokenDataset([path], (), 7, 5), TokenDataset([path], (2.5,), 7, 5)
    assert (plain.batch(index)["tokens"] == weighted.batch(index)["tokens"]).all()


@given(fraction=st.floats(0.001, 0.9), seq_len=st.integers(1, 20))
@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
def test_held_out_samples_are_never_trained_on(write, fraction: float, seq_len: int) -> None:
    files = [write([n], name=f"{n}.tokens") for n in (60, 200)]
    data = TokenDataset([file.path for file in files], (), seq_len, 1, eval_fraction=fraction)
    whole = TokenDataset([file.path for file in files], (), seq_len, 1)
    assert data.num_train + data.num_eval == whole.num_train
    place = data.locate(np.arange(2 * data.num_train))
    for number, file in enumerate(files):
        total = -(-(len(file.tokens) - 1) // seq_len)
        trained = set(place.sample[place.file == number].tolist())
        assert trained == set(range(len(trained)))
        assert 1 <= total - len(trained) == max(1, min(total - 1, round(total * fraction)))
    # Together, the targets of both splits are the targets of the file: none is in both.
    targets = sum(
        int((split(np.arange(num))["targets"] != NO_TARGET).sum())
        for split, num in ((data.batch, data.num_train), (data.eval_batch, data.num_eval))
    )
    assert targets == sum(len(file.tokens) - 1 for file in files)


def test_rows_past_the_held_out_samples_have_no_target(write) -> None:
    data = TokenDataset([write([100]).path], (), 10, 1, eval_fraction=0.3, mask_documents=True)
    assert data.num_eval == 3
    batch = data.eval_batch(np.arange(8))
    assert (batch["targets"][3:] == NO_TARGET).all()
    assert (batch["targets"][:3] != NO_TARGET).sum() == 30
    assert (batch["tokens"][:3, 0] == [70, 80, 90]).all()
    assert batch["documents"].shape == (8, 10)


def test_no_split_no_evaluation(write) -> None:
    data = TokenDataset([write([100]).path], (), 10, 1)
    assert data.num_eval == 0
    assert (data.eval_batch(np.arange(2))["targets"] == NO_TARGET).all()


def test_all_faults_at_once(write, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    other = write([9], name="other", tokenizer="other")
    with pytest.raises(ValidationError) as caught:
        TokenDataset(
            [write([9]).path, tmp_path / "a.txt", tmp_path / "none", other.path], (1, 2), 0, 0, eval_fraction=1.0
        )
    text = str(caught.value)
    assert [fault.key for fault in caught.value.issues] == ["data.path"] * 3 + [
        "seq_len",
        "data.eval_fraction",
        "data.weights",
    ]
    for part in ("a.txt", "none", "another tokenizer", "legal: >= 1", "0 <= x < 1", "each of the 4 sources"):
        assert part in text
    with pytest.raises(ValidationError, match=r"data\.path is empty"):
        TokenDataset([], (), 8, 0)
    with pytest.raises(ValidationError, match="a weight must be positive"):
        TokenDataset([other.path], (0.0,), 8, 0)
    with pytest.raises(ValidationError, match=r"leaves nothing to evaluate on.*smaller seq_len"):
        TokenDataset([other.path], (), 100, 0, eval_fraction=0.1)


def test_the_fingerprint_identifies_data_and_order(write) -> None:
    a, b = write([90], name="a").path, write([91], name="b").path
    prints = [
        TokenDataset(files, weights, seq_len, seed, mask_documents=mask, eval_fraction=fraction).fingerprint
        for files, weights, seq_len, seed, mask, fraction in [
            ([a], (), 8, 0, False, 0.0),
            ([b], (), 8, 0, False, 0.0),
            ([a, b], (), 8, 0, False, 0.0),
            ([b, a], (), 8, 0, False, 0.0),
            ([a, b], (1, 1), 8, 0, False, 0.0),
            ([a, b], (2, 1), 8, 0, False, 0.0),
            ([a], (), 9, 0, False, 0.0),
            ([a], (), 8, 1, False, 0.0),
            ([a], (), 8, 0, True, 0.0),
            ([a], (), 8, 0, False, 0.1),
        ]
    ]
    assert len(set(prints)) == len(prints)
    moved = a.rename(a.with_name("elsewhere"))
    assert TokenDataset([moved], (), 8, 0).fingerprint == prints[0]


def test_sources_of_one_size_have_different_orders(write) -> None:
    files = [write([1000], name=name).path for name in ("a", "b")]
    place = TokenDataset(files, (1, 1), 10, 1).locate(np.arange(200))
    assert (place.sample[place.file == 0] == place.sample[place.file == 1]).sum() < 10
