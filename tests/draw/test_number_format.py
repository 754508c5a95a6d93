from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.draw.number_format import format_bytes, format_count, format_duration, format_time, percent, ticks


def test_ticks_are_round():
    assert ticks(33, 10) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(0.3786, 8) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35])
    assert ticks(0, 5) == [0]


@given(st.floats(1e-9, 1e9), st.integers(5, 40))
def test_ticks_are_few_and_within_the_axis(end, max_ticks):
    marks = ticks(end, max_ticks)
    assert 2 <= len(marks) <= max_ticks + 1
    assert marks[-1] <= end * (1 + 1e-6)


def test_times_are_in_s_ms_or_us():
    assert [format_time(value, True) for value in (0, 2.5e-5, 0.0123, 1.5)] == [
        "0 s",
        "25 µs",
        "12.3 ms",
        "1.5 s",
    ]
    assert format_time(33.0, False) == "33"


def test_bytes_are_binary_and_counts_decimal():
    assert format_bytes(3 * 2**29) == "1.5 GiB"
    assert format_bytes(28.2 * 2**20) == "28.2 MiB"
    assert format_bytes(3.1 * 2**10) == "3.1 KiB"
    assert [format_count(n) for n in (68_123, 1_500_000, 950, 2.5e12)] == ["68.1k", "1.50M", "950", "2.50T"]


def test_counts_that_round_up_to_a_unit_are_in_that_unit():
    assert [format_count(n) for n in (999_499, 999_700, 999.7, 999.7e9)] == ["999k", "1.00M", "1.00k", "1.00T"]


def test_shares_and_durations():
    assert [percent(share) for share in (0.273, 0.0012, 0.0, 1.0)] == ["27.3 %", "0.12 %", "0.0 %", "100.0 %"]
    assert [format_duration(s) for s in (12, 18_000, 3.2 * 86_400, 300)] == ["12 s", "5.0 h", "3.2 days", "5.0 min"]
