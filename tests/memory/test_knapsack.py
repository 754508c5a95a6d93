"""What is chosen fits, and nothing that fits is cheaper, but for what rounding takes."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from echelon.memory.checkpointing.knapsack import CheckpointOption, peak_bytes, solve_knapsack, total_seconds

SIZES = st.integers(1, 1000)


@st.composite
def layers(draw: st.DrawFn) -> list[list[CheckpointOption]]:
    """A few layers, each with several ways; the last keeps the least."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        whole = draw(st.integers(100, 1000))
        kept = sorted((draw(st.integers(1, whole)) for _ in range(draw(st.integers(0, 2)))), reverse=True)
        costs = sorted(draw(SIZES) for _ in range(len(kept) + 1))
        ways = [CheckpointOption(form="none", saved_bytes=whole, backward_bytes=whole, seconds=0.0)]
        ways += [
            CheckpointOption(
                form=f"way {i}", saved_bytes=size, backward_bytes=draw(st.integers(size, whole)), seconds=float(seconds)
            )
            for i, (size, seconds) in enumerate(zip(kept, costs, strict=False))
        ]
        least = min([whole, *kept])
        ways.append(
            CheckpointOption(
                form="full", saved_bytes=draw(st.integers(1, least)), backward_bytes=whole, seconds=float(costs[-1])
            )
        )
        found.append(ways)
    return found


def cheapest(ways: list[list[CheckpointOption]], in_flight: list[int], budget: float) -> float | None:
    fits = [total_seconds(one) for one in product(*ways) if peak_bytes(one, in_flight) <= budget]
    return min(fits, default=None)


@given(layers(), st.floats(0.05, 1.1), st.integers(1, 3))
def test_the_optimum_is_found(ways: list[list[CheckpointOption]], share: float, count: int) -> None:
    in_flight = [count] * len(ways)
    budget = share * peak_bytes([one[0] for one in ways], in_flight)
    found = solve_knapsack(ways, in_flight, budget)
    best, nearly = cheapest(ways, in_flight, budget), cheapest(ways, in_flight, 0.98 * budget)
    if found is None:
        assert nearly is None
        return
    assert all(way in one for way, one in zip(found, ways, strict=True))
    assert peak_bytes(found, in_flight) <= budget
    assert best is not None
    assert best <= total_seconds(found)
    if nearly is not None:
        assert total_seconds(found) <= nearly


@given(layers())
def test_everything_is_saved_where_it_fits(ways: list[list[CheckpointOption]]) -> None:
    enough = peak_bytes([one[0] for one in ways], [1] * len(ways))
    found = solve_knapsack(ways, [1] * len(ways), 1.02 * enough)
    assert found is not None
    assert total_seconds(found) == 0


def test_layers_at_the_start_are_recomputed() -> None:
    ways = [
        CheckpointOption(form="none", saved_bytes=100, backward_bytes=100, seconds=0),
        CheckpointOption(form="full", saved_bytes=10, backward_bytes=100, seconds=1),
    ]
    found = solve_knapsack([ways] * 10, [1] * 10, 560)
    assert found is not None
    assert [way.form for way in found] == ["full"] * 5 + ["none"] * 5


def test_equal_layers_keep_their_order_where_only_that_fits() -> None:
    """The layer that saves more needs more in its backward, too: it is the first, before anything else is saved."""
    ways = [
        CheckpointOption(form="much", saved_bytes=50, backward_bytes=100, seconds=0),
        CheckpointOption(form="little", saved_bytes=40, backward_bytes=40, seconds=1),
    ]
    found = solve_knapsack([ways] * 2, [1] * 2, 101)
    assert found is not None
    assert [way.form for way in found] == ["much", "little"]
    assert peak_bytes(found, [1] * 2) == 100


def test_the_peak_counts_the_microbatches_in_flight() -> None:
    options = [CheckpointOption(form="none", saved_bytes=6.0, backward_bytes=10.0, seconds=0.0)] * 2
    assert peak_bytes(options, [3, 3]) == 6 * 6 + 4
    assert peak_bytes(options, [3, 1]) == 6 * 4 + 4
