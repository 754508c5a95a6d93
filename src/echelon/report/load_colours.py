"""The colours of loads: how far an expert is from the mean of its layer, in eight steps, and none for no token at all.

On light paper more is darker, on dark paper more is brighter, so that what is little recedes in both. Lightness goes
one way through each scale, for eyes that do not tell all hues apart; a test computes what such eyes see.
"""

from __future__ import annotations

from bisect import bisect_right

LOAD_EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0)
"""loads to the mean at which the next step begins"""
LOAD_LABELS = ("to 1/4", "to 1/2", "to 0.8", "to 1.25", "to 2", "to 4", "to 8", "more")
"""of the steps: where each ends"""
ON_LIGHT = ("#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
ON_DARK = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
NO_TOKEN = "no token"


def colour_index(load: float) -> int | None:
    """The step of a load to the mean; none where there was no token."""
    return bisect_right(LOAD_EDGES, load) if load > 0 else None


def expert_rows(experts: int, max_rows: int) -> list[range]:
    """The experts of each row, where there is room for so many rows: one each, or as many as it takes."""
    each = -(-experts // max(1, max_rows))
    return [range(start, min(start + each, experts)) for start in range(0, experts, each)]


def row_load(loads: list[float], row: range) -> float:
    """What a row shows: the busiest of its experts."""
    return max((loads[expert] for expert in row if expert < len(loads)), default=0.0)


def row_label(row: range) -> str:
    return str(row.start) if len(row) == 1 else f"{row.start}-{row.stop - 1}"
