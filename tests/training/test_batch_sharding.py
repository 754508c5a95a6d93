"""Batches that cannot be cut into samples are refused: a slice of something else would be wrong on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from echelon.training.batch_sharding import count_rows

ROWS = torch.zeros(8, 3)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "the batch is empty"),
        ({"x": ROWS[:0]}, "the batch has no rows"),
        ({"x": ROWS, "mode": "sum", "scale": 2.0}, "a batch consists of tensors (mode: str, scale: float); give each"),
        ({"x": ROWS, "positions": torch.arange(3)}, "differ in rows (x: [8, 3], positions: [3])"),
        ({"x": ROWS, "scale": torch.tensor(2.0)}, "differ in rows (x: [8, 3], scale: [])"),
        ({"scale": torch.tensor(2.0), "x": ROWS[:1]}, "differ in rows (scale: [])"),
    ],
)
def test_what_has_no_samples_is_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        count_rows(batch)


def test_rows_of_a_batch() -> None:
    assert count_rows({"x": ROWS, "y": ROWS[:, 0]}) == 8
