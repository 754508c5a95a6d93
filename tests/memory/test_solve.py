"""What is chosen fits, and nothing that fits is cheaper, but for what rounding takes."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from echelon.memory.checkpointing.knapsack import Way, cost, peak, solve

SIZES = st.integers(1, 1000)


@st.composite
def layers(draw: st.DrawFn) -> list[list[Way]]:
    """A few layers, each with several ways; the last keeps the least."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        whole = draw(st.integers(100, 1000))
        kept = sorted((draw(st.integers(1, whole)) for _ in range(draw(st.integers(0, 2)))), reverse=True)
        costs = sorted(draw(SIZES) for _ in range(len(kept) + 1))
        ways = [Way(form="none", kept=whole, inside=whole, cost=0.0)]
        ways += [
            Way(form=f"way {i}", kept=size, inside=draw(st.integers(size, whole)), cost=float(seconds))
            for i, (size, seconds) in enumerate(zip(kept, costs, strict=False))
        ]
        least = min([whole, *kept])
        ways.append(Way(form="full", kept=draw(st.integers(1, least)), inside=whole, cost=float(costs[-1])))
        found.append(ways)
    return found


def cheapest(ways: list[list[Way]], in_flight: list[int], budget: float) -> float | None:
    fits = [cost(one) for one in product(*ways) if peak(one, in_flight) <= budget]
    return min(fits, default=None)


@given(layers(), st.floats(0.05, 1.1), st.integers(1, 3))
def test_the_best_is_found(ways: list[list[Way]], share: float, count: int) -> None:
    in_flight = [count] * len(ways)
    budget = share * peak([one[0] for one in ways], in_flight)
    found = solve(ways, in_flight, budget)
    best, nearly = cheapest(ways, in_flight, budget), cheapest(ways, in_flight, 0.98 * budget)
    if found is None:
        assert nearly is None
        return
    assert all(way in one for way, one in zip(found, ways, strict=True))
    assert peak(found, in_flight) <= budget
    assert best is not None
    assert best <= cost(found)
    if nearly is not None:
        assert cost(found) <= nearly


@given(layers())
def test_everything_is_kept_where_there_is_room(ways: list[list[Way]]) -> None:
    enough = peak([one[0] for one in ways], [1] * len(ways))
    found = solve(ways, [1] * len(ways), 1.02 * enough)
    assert found is not None
    assert cost(found) == 0


def test_layers_at_the_beginning_are_repeated() -> None:
    ways = [Way(form="none", kept=100, inside=100, cost=0), Way(form="full", kept=10, inside=100, cost=1)]
    found = solve([ways] * 10, [1] * 10, 560)
    assert found is not None
    assert [way.form for way in found] == ["full"] * 5 + ["none"] * 5
