"""Which layer does what so that all fit into a budget, and the least time is spent on repeating: a knapsack. No torch.

[Note: what must fit]

Forward fills memory layer by layer, backward empties it from the end. When layer i goes backward, what layers
0 .. i - 1 keep is still there, and beside it all that layer i itself needs, made again or not:

    kept(0) + ... + kept(i - 1) + inside(i)  <=  budget        for every i, and the sum of all kept <= budget

So layers at the beginning are repeated rather than those at the end. Where several microbatches are in flight, each but
the one at work holds what it keeps of every layer; then the layer at work is taken to stand at the end, which asks for
more room than it needs, by less than one microbatch.

The best choice is found by dynamic programming over the bytes used so far, in steps of the budget / STEPS. Bytes are
rounded up, so what is chosen fits; and nothing better fits into the budget less one step for each layer, 1 % at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUDGET_STEPS = 4096
STEPS_PER_LAYER = 128
"""steps, at least"""


@dataclass(frozen=True, kw_only=True)
class CheckpointOption:
    """One thing that a layer can do."""

    form: str
    saved_bytes: float
    """bytes that stay until backward"""
    backward_bytes: float
    """bytes that are there while it goes backward, those kept among them"""
    seconds: float
    """seconds to make again what was not kept"""


def peak_bytes(options: Sequence[CheckpointOption], in_flight: Sequence[int]) -> float:
    """The most bytes that are there at once, with one way for each layer; see the note."""
    total = sum(way.saved_bytes * count for way, count in zip(options, in_flight, strict=True))
    if max(in_flight, default=1) > 1:
        return total + max((way.backward_bytes - way.saved_bytes for way in options), default=0.0)
    fullest, before = total, 0.0
    for way in options:
        fullest = max(fullest, before + way.backward_bytes)
        before += way.saved_bytes
    return fullest


def solve_knapsack(
    layers: Sequence[Sequence[CheckpointOption]], in_flight: Sequence[int], budget: float
) -> list[CheckpointOption] | None:
    """One way for each layer, which together cost the least of those that fit; none where none do."""
    found = _solve(layers, in_flight, budget)
    if found is None:
        return None
    neat = _reorder_alike(layers, in_flight, found)
    return neat if peak_bytes(neat, in_flight) <= budget else found


def _reorder_alike(
    layers: Sequence[Sequence[CheckpointOption]], in_flight: Sequence[int], found: Sequence[CheckpointOption]
) -> list[CheckpointOption]:
    """Of layers that are alike, the first keep the least."""
    alike: dict[tuple[tuple[CheckpointOption, ...], int], list[int]] = {}
    for index, (ways, count) in enumerate(zip(layers, in_flight, strict=True)):
        alike.setdefault((tuple(ways), count), []).append(index)
    neat = list(found)
    for places in alike.values():
        for place, way in zip(places, sorted((found[p] for p in places), key=lambda way: way.saved_bytes), strict=True):
            neat[place] = way
    return neat


def _solve(
    layers: Sequence[Sequence[CheckpointOption]], in_flight: Sequence[int], budget: float
) -> list[CheckpointOption] | None:
    if max(in_flight, default=1) == 1:
        return _dynamic_program(layers, in_flight, budget, one_in_flight=True)
    extras = sorted({way.backward_bytes - way.saved_bytes for ways in layers for way in ways})
    found: list[CheckpointOption] | None = None
    for extra in extras:
        some = [[way for way in ways if way.backward_bytes - way.saved_bytes <= extra] for ways in layers]
        if budget > extra and all(some):
            one = _dynamic_program(some, in_flight, budget - extra, one_in_flight=False)
            if one is not None and (found is None or total_seconds(one) < total_seconds(found)):
                found = one
    return found


def total_seconds(options: Sequence[CheckpointOption]) -> float:
    return sum(way.seconds for way in options)


def _dynamic_program(
    layers: Sequence[Sequence[CheckpointOption]], in_flight: Sequence[int], budget: float, *, one_in_flight: bool
) -> list[CheckpointOption] | None:
    import numpy as np

    steps = max(BUDGET_STEPS, STEPS_PER_LAYER * len(layers))
    unit = budget / steps
    best = np.full(steps + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for ways, count in zip(layers, in_flight, strict=True):
        now, choice = np.full(steps + 1, np.inf), np.zeros(steps + 1, dtype=np.int8)
        for number, way in enumerate(ways):
            size = _rounded_up(way.saved_bytes * count, unit)
            room = steps - max(size, _rounded_up(way.backward_bytes, unit) if one_in_flight else 0)
            if room < 0:
                continue
            tried = best[: room + 1] + way.seconds
            place = slice(size, size + room + 1)
            better = tried < now[place]
            now[place][better] = tried[better]
            choice[place][better] = number
        chosen.append(choice)
        best = now
    if not np.isfinite(best).any():
        return None
    used, found = int(best.argmin()), []
    for ways, count, choice in zip(reversed(layers), reversed(in_flight), reversed(chosen), strict=True):
        way = ways[choice[used]]
        found.append(way)
        used -= _rounded_up(way.saved_bytes * count, unit)
    return found[::-1]


def _rounded_up(size: float, unit: float) -> int:
    return int(-(-size // unit))
