"""TeraPipe's slice lengths, chosen by dynamic programming.

[Note: the best slices]

A slice of l tokens after c others takes time(l, c) on a stage: attention over a long context is slower, and a short
slice does not fill a device. With d stages a sequence takes

    sum of the slices' times  +  (d - 1) x the longest of them

1. Suppose that the longest time is at most T. The least sum under T is a shortest path over the cuts of the sequence.
   Call it S(T): it falls, in steps, as T grows.
2. The answer is the least S(T) + (d - 1) x T over all T that are the time of some slice.
3. Between two candidates low < high nothing is below S(high) + (d - 1) x (the candidate after low). If that is no
   better than the best answer so far, all in between are skipped; else the middle one is tried, and both halves.
   So few candidates are tried, and the answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

CutPath = tuple[float, tuple[int, ...]]
"""a sum of times and the cuts that give it"""

INFINITY = float("inf")


def choose_slice_lengths(
    length: int, stages: int, slice_time: Callable[[int, int], float], granularity: int = 1
) -> tuple[int, ...]:
    """The slice lengths with which `stages` stages finish a sequence soonest. See [Note: the best slices].

    `slice_time(tokens, before)` is what a slice takes on one stage after `before` other tokens. Slices are multiples of
    `granularity` tokens; the last one takes the rest.
    """
    if length < 1 or stages < 1 or granularity < 1:
        raise ValueError(
            f"nothing to slice (length={length}, stages={stages}, granularity={granularity}); give 1 or more of each"
        )
    cuts = [*range(0, length, granularity), length]
    times = [[slice_time(end - start, start) for start in cuts[:place]] for place, end in enumerate(cuts)]
    candidates = sorted({seconds for row in times for seconds in row})
    best: float = INFINITY
    chosen: tuple[int, ...] = ()

    def attempt(candidate: int) -> float:
        nonlocal best, chosen
        total, places = _shortest_path(times, candidates[candidate])
        if total + (stages - 1) * candidates[candidate] < best:
            best, chosen = total + (stages - 1) * candidates[candidate], places
        return total

    top = len(candidates) - 1
    between = [(-1, top, attempt(top))]
    while between:
        low, high, total = between.pop()
        if high - low > 1 and total + (stages - 1) * candidates[low + 1] < best:
            middle = (low + high) // 2
            between += [(middle, high, total), (low, middle, attempt(middle))]
    return tuple(cuts[end] - cuts[start] for start, end in pairwise(chosen))


def _shortest_path(times: list[list[float]], limit: float) -> CutPath:
    """The least sum of times where none is above the limit, and its cuts; infinite where there is none."""
    reached: list[float] = [0.0]
    came_from = [0]
    for row in times[1:]:
        ways = (
            (reached[start] + seconds if seconds <= limit else INFINITY, start) for start, seconds in enumerate(row)
        )
        total, start = min(ways)
        reached.append(total)
        came_from.append(start)
    places = [len(times) - 1]
    while places[-1]:
        places.append(came_from[places[-1]])
    return reached[-1], tuple(reversed(places))
