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

STEPS = 4096
PER_LAYER = 128
"""steps, at least"""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One thing that a layer can do."""

    form: str
    kept: float
    """bytes that stay until backward"""
    inside: float
    """bytes that are there while it goes backward, those kept among them"""
    cost: float
    """seconds to make again what was not kept"""


def peak(ways: Sequence[Way], in_flight: Sequence[int]) -> float:
    """The most bytes that are there at once, with one way for each layer; see the note."""
    total = sum(way.kept * count for way, count in zip(ways, in_flight, strict=True))
    if max(in_flight, default=1) > 1:
        return total + max((way.inside - way.kept for way in ways), default=0.0)
    fullest, before = total, 0.0
    for way in ways:
        fullest = max(fullest, before + way.inside)
        before += way.kept
    return fullest


def solve(layers: Sequence[Sequence[Way]], in_flight: Sequence[int], budget: float) -> list[Way] | None:
    """One way for each layer, which together cost the least of those that fit; none where none do."""
    found = _solve(layers, in_flight, budget)
    if found is None:
        return None
    neat = _in_order(layers, in_flight, found)
    return neat if peak(neat, in_flight) <= budget else found


def _in_order(layers: Sequence[Sequence[Way]], in_flight: Sequence[int], found: Sequence[Way]) -> list[Way]:
    """Of layers that are alike, the first keep the least."""
    alike: dict[tuple[tuple[Way, ...], int], list[int]] = {}
    for index, (ways, count) in enumerate(zip(layers, in_flight, strict=True)):
        alike.setdefault((tuple(ways), count), []).append(index)
    neat = list(found)
    for places in alike.values():
        for place, way in zip(places, sorted((found[p] for p in places), key=lambda way: way.kept), strict=True):
            neat[place] = way
    return neat


def _solve(layers: Sequence[Sequence[Way]], in_flight: Sequence[int], budget: float) -> list[Way] | None:
    if max(in_flight, default=1) == 1:
        return _best(layers, in_flight, budget, orderly=True)
    extras = sorted({way.inside - way.kept for ways in layers for way in ways})
    found: list[Way] | None = None
    for extra in extras:
        some = [[way for way in ways if way.inside - way.kept <= extra] for ways in layers]
        if budget > extra and all(some):
            one = _best(some, in_flight, budget - extra, orderly=False)
            if one is not None and (found is None or cost(one) < cost(found)):
                found = one
    return found


def cost(ways: Sequence[Way]) -> float:
    return sum(way.cost for way in ways)


def _best(
    layers: Sequence[Sequence[Way]], in_flight: Sequence[int], budget: float, *, orderly: bool
) -> list[Way] | None:
    import numpy as np

    steps = max(STEPS, PER_LAYER * len(layers))
    unit = budget / steps
    best = np.full(steps + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for ways, count in zip(layers, in_flight, strict=True):
        now, choice = np.full(steps + 1, np.inf), np.zeros(steps + 1, dtype=np.int8)
        for number, way in enumerate(ways):
            size = _rounded_up(way.kept * count, unit)
            room = steps - max(size, _rounded_up(way.inside, unit) if orderly else 0)
            if room < 0:
                continue
            tried = best[: room + 1] + way.cost
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
        used -= _rounded_up(way.kept * count, unit)
    return found[::-1]


def _rounded_up(size: float, unit: float) -> int:
    return int(-(-size // unit))
