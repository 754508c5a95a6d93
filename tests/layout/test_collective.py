from __future__ import annotations

from echelon.layout.collective import Collective, count_collectives


def test_count_collectives_adds_equal_ones() -> None:
    issued = [
        Collective(op="all_reduce", axis="dp", bytes=8),
        Collective(op="all_reduce", axis="dp", bytes=8, count=3, overlapped=True, purpose="other"),
        Collective(op="all_reduce", axis="tp", bytes=8),
        Collective(op="all_gather", axis="dp", bytes=8),
        Collective(op="all_reduce", axis="dp", bytes=16),
    ]
    assert count_collectives(issued) == {
        ("all_reduce", "dp", 8): 4,
        ("all_reduce", "tp", 8): 1,
        ("all_gather", "dp", 8): 1,
        ("all_reduce", "dp", 16): 1,
    }


def test_a_collective_with_count_zero_is_left_out() -> None:
    assert ("all_gather", "dp", 8) not in count_collectives([Collective(op="all_gather", axis="dp", bytes=8, count=0)])
