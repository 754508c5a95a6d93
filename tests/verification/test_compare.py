"""How one rank holds its pieces against the truth."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.layout.placement import DimSplit, LogicalParam, ParamGroupSpec, Placement
from echelon.verification.compare import absolute_error, expected_piece, relative_error


@pytest.mark.parametrize(
    ("value", "truth", "whole", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.5], [1.0], [1.0], 0.5),
        ([0.1], [0.0], [0.01], 0.1),  # below one the error is absolute
        ([101.0], [100.0], [100.0], 0.01),
        ([2.0], [1.0], [-200.0], 0.005),  # the scale is the whole tensor's, not that of the piece at hand
        ([math.nan], [0.0], [1.0], math.inf),
        ([math.inf], [0.0], [1.0], math.inf),
        ([], [], [1.0], 0.0),
    ],
)
def test_absolute_error(value: list[float], truth: list[float], whole: list[float], found: float) -> None:
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in (value, truth, whole)]
    assert absolute_error(*tensors) == pytest.approx(found)


@pytest.mark.parametrize(
    ("value", "truth", "size", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0], 1.0, 0.0),
        ([1.1e-9], [1.0e-9], 1.0e-9, 0.1),  # small values count as much as large ones
        ([3.0, 4.0], [0.0, 0.0], 10.0, 0.5),
        ([0.0], [0.0], 0.0, 0.0),
        ([math.nan], [0.0], 1.0, math.inf),
        ([], [], 1.0, 0.0),
    ],
)
def test_relative_error(value: list[float], truth: list[float], size: float, found: float) -> None:
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in (value, truth)]
    assert relative_error(*tensors, size) == pytest.approx(found)


def test_expected_piece_is_padded_with_zeros() -> None:
    entry = LogicalParam(name="w", names=("w",), shape=(5, 2), splits=(DimSplit(axis="tp", dim=0, num_parts=2),))
    unit = ParamGroupSpec(name="", params=(entry,), num_shards=2)
    whole = torch.arange(10.0).view(5, 2)

    def held(tp: int, shard: int) -> list[float]:
        at = {"tp": tp, "shard": shard, "replica": 0, "cp": 0}
        return expected_piece(whole, Placement(param_groups=(unit,), coordinates=at).piece(unit, entry)).tolist()

    assert [held(0, 0), held(0, 1)] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert [held(1, 0), held(1, 1)] == [[6.0, 7.0, 8.0], [9.0, 0.0, 0.0]]
