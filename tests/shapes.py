"""Sizes of pipeline schedules, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import FAMILIES, ScheduleFamily, make_schedule

ASYNCHRONOUS = tuple(name for name, family in FAMILIES.items() if family.asynchronous)


@st.composite
def shapes(
    draw: DrawFn, names: tuple[str, ...] = tuple(FAMILIES), least_ranks: int = 1
) -> tuple[ScheduleFamily, dict[str, Any]]:
    """A family, and sizes that it allows."""
    family = FAMILIES[draw(st.sampled_from(names))]
    chunks = draw(st.integers(2, 4)) if family.chunks is None else family.chunks
    sizes = {"ranks": draw(st.integers(least_ranks, 6)), "microbatches": draw(st.integers(1, 12)), "chunks": chunks}
    if family.has_slices:
        sizes["slices"] = draw(st.integers(1, 3))
    return family, sizes


def schedules(**options: Any) -> SearchStrategy[Schedule]:
    return shapes(**options).map(lambda shape: make_schedule(shape[0].name, **shape[1]))


@st.composite
def streams(draw: DrawFn) -> tuple[str, int, list[int]]:
    """An asynchronous family, its ranks, and the sizes of the windows that a stream is cut into."""
    name = draw(st.sampled_from(ASYNCHRONOUS))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    # A window of 2bw is a batch, so all of them have one size.
    return name, draw(st.integers(1, 6)), [sizes[0]] * len(sizes) if name == "2bw" else sizes


def windows(name: str, ranks: int, sizes: list[int], *, drain: bool = True) -> list[Schedule]:
    """The windows of a stream; the last one drains, or none does."""
    last = len(sizes) - 1
    return [
        make_schedule(name, ranks, size, first_microbatch=sum(sizes[:place]), drain=drain and place == last)
        for place, size in enumerate(sizes)
    ]
