"""Chooses a checkpoint option for each layer so that all fit a budget at the least time. No torch.

[Note: what must fit]

Forward fills memory layer by layer, backward empties it from the end. During the backward of layer i, the saved
activations of layers 0 .. i - 1 are still there, and so is all that layer i itself needs, recomputed or not:

    saved(0) + ... + saved(i - 1) + backward(i)  <=  budget        for every i, and the sum of all saved <= budget

So layers at the start are recomputed rather than those at the end. Where several microbatches are in flight, each but
the one at work holds its saved activations of every layer; then the layer at work is assumed to be the last, which
overestimates the peak by less than one microbatch.

Dynamic programming over the bytes used so far, in steps of budget / BUDGET_STEPS, finds the best choice. Bytes are
rounded up, so the choice fits; and nothing better fits into the budget less one step per layer, 1 % at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUDGET_STEPS = 4096
STEPS_PER_LAYER = 128
"""at least"""


@dataclass(frozen=True, kw_only=True)
class CheckpointOption:
    """One way to checkpoint a layer."""

    form: str
    saved_bytes: float
    """bytes from forward to backward"""
    backward_bytes: float
    """bytes during its backward, including the saved ones"""
    seconds: float
    """seconds to recompute what is not saved"""

    @property
    def extra_bytes(self) -> float:
        return self.backward_bytes - self.saved_bytes


LayerOptions = Sequence[Sequence[CheckpointOption]]


def peak_bytes(options: Sequence[CheckpointOption], in_flight: Sequence[int]) -> float:
    """Return the peak bytes with one option per layer; see [Note: what must fit]."""
    total = sum(option.saved_bytes * count for option, count in zip(options, in_flight, strict=True))
    if max(in_flight, default=1) > 1:
        return total + max((option.extra_bytes for option in options), default=0.0)
    fullest, before = total, 0.0
    for option in options:
        fullest = max(fullest, before + option.backward_bytes)
        before += option.saved_bytes
    return fullest


def solve_knapsack(layers: LayerOptions, in_flight: Sequence[int], budget: float) -> list[CheckpointOption] | None:
    """Return the options, one per layer, of the least total seconds that fit; None where none do."""
    chosen_options = _solve(layers, in_flight, budget)
    if chosen_options is None:
        return None
    reordered = _reorder_alike(layers, in_flight, chosen_options)
    return reordered if peak_bytes(reordered, in_flight) <= budget else chosen_options


def _reorder_alike(
    layers: LayerOptions, in_flight: Sequence[int], chosen_options: Sequence[CheckpointOption]
) -> list[CheckpointOption]:
    """Reorder options among identical layers: the first save the least."""
    alike: dict[tuple[tuple[CheckpointOption, ...], int], list[int]] = {}
    for index, (options, count) in enumerate(zip(layers, in_flight, strict=True)):
        alike.setdefault((tuple(options), count), []).append(index)
    reordered = list(chosen_options)
    for indices in alike.values():
        by_size = sorted((chosen_options[index] for index in indices), key=lambda option: option.saved_bytes)
        for index, option in zip(indices, by_size, strict=True):
            reordered[index] = option
    return reordered


def _solve(layers: LayerOptions, in_flight: Sequence[int], budget: float) -> list[CheckpointOption] | None:
    if max(in_flight, default=1) == 1:
        return _dynamic_program(layers, in_flight, budget, one_in_flight=True)
    solutions = []
    for extra in sorted({option.extra_bytes for options in layers for option in options}):
        allowed = [[option for option in options if option.extra_bytes <= extra] for options in layers]
        if budget > extra and all(allowed):
            solutions.append(_dynamic_program(allowed, in_flight, budget - extra, one_in_flight=False))
    return min((solution for solution in solutions if solution is not None), key=total_seconds, default=None)


def total_seconds(options: Sequence[CheckpointOption]) -> float:
    return sum(option.seconds for option in options)


def _dynamic_program(
    layers: LayerOptions, in_flight: Sequence[int], budget: float, *, one_in_flight: bool
) -> list[CheckpointOption] | None:
    import numpy as np

    steps = max(BUDGET_STEPS, STEPS_PER_LAYER * len(layers))
    unit = budget / steps
    best = np.full(steps + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for options, count in zip(layers, in_flight, strict=True):
        best_here, choice = np.full(steps + 1, np.inf), np.zeros(steps + 1, dtype=np.int8)
        for number, option in enumerate(options):
            size = _rounded_up(option.saved_bytes * count, unit)
            last_start = steps - max(size, _rounded_up(option.backward_bytes, unit) if one_in_flight else 0)
            if last_start < 0:
                continue
            candidate = best[: last_start + 1] + option.seconds
            where = slice(size, size + last_start + 1)
            better = candidate < best_here[where]
            best_here[where][better] = candidate[better]
            choice[where][better] = number
        chosen.append(choice)
        best = best_here
    if not np.isfinite(best).any():
        return None
    used, chosen_options = int(best.argmin()), []
    for options, count, choice in zip(reversed(layers), reversed(in_flight), reversed(chosen), strict=True):
        option = options[choice[used]]
        chosen_options.append(option)
        used -= _rounded_up(option.saved_bytes * count, unit)
    return chosen_options[::-1]


def _rounded_up(size: float, unit: float) -> int:
    return int(-(-size // unit))
