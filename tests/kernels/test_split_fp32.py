"""A float32 in two halves comes back bit for bit, and its upper half is what a cast would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echelon.kernels.optim.split_fp32 import QUIET_NAN, join_halves, split_halves


def floats(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    high, low = torch.empty(values.shape, dtype=torch.bfloat16), torch.empty(values.shape, dtype=torch.int16)
    split_halves(values, high, low)
    return high, low


def bits_of(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()  # type: ignore[no-any-return]


EDGES = floats(
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000),  # zeros, subnormals
    *(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF818000),  # ties and their neighbours
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),  # the largest, the infinite
)


def test_edge_values_round_trip() -> None:
    assert bits_of(join_halves(*halves(EDGES))) == bits_of(EDGES)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_every_float_round_trips(bits: list[int]) -> None:
    values = floats(*bits)
    back = join_halves(*halves(values))
    same = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    assert bits_of(back) == same.tolist()


def test_the_upper_half_is_a_cast_except_for_ties() -> None:
    values = torch.randn(100_000) * torch.logspace(-30, 30, 100_000)
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    high = halves(values)[0]
    assert torch.equal(high[~tie], values.bfloat16()[~tie])
    assert halves(floats(0x3F808000, 0x3F818000, 0xBF808000))[0].tolist() == [1.0078125, 1.015625, -1.0078125]


def test_overflow_of_bfloat16_shows_infinite_and_round_trips() -> None:
    values = floats(0x7F7F8000, 0xFF7FFFFF)
    high, low = halves(values)
    assert high.tolist() == values.bfloat16().tolist() == [float("inf"), float("-inf")]
    assert join_halves(high, low).isfinite().all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_nan_shows_in_both_halves(bits: int) -> None:
    """The bits of 0x7fffffff, which GPUs make, would round to a zero."""
    high, low = halves(floats(bits))
    assert high.isnan().all()
    assert join_halves(high, low).isnan().all()
