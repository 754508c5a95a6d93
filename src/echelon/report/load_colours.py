"""The colours of expert load: the load relative to the layer's mean in eight steps, and none for no token at all.

On a light background higher loads are darker, on a dark one brighter. Lightness is monotonic in each scale, for
colour-blind readers; a test simulates colour blindness.
"""

from __future__ import annotations

from bisect import bisect_right

LOAD_EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0)
"""relative loads at which the next colour begins"""
LOAD_LABELS = ("to 1/4", "to 1/2", "to 0.8", "to 1.25", "to 2", "to 4", "to 8", "more")
"""where each colour ends"""
ON_LIGHT = ("#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
ON_DARK = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
NO_TOKEN = "no token"


def colour_index(load: float) -> int | None:
    """The colour of a relative load; None where there was no token."""
    return bisect_right(LOAD_EDGES, load) if load > 0 else None


def expert_rows(experts: int, max_rows: int) -> list[range]:
    """The experts of each row, in at most `max_rows` rows."""
    each = -(-experts // max(1, max_rows))
    return [range(start, min(start + each, experts)) for start in range(0, experts, each)]


def row_load(loads: list[float], row: range) -> float:
    """The load that a row shows: that of its busiest expert."""
    return max((loads[expert] for expert in row if expert < len(loads)), default=0.0)


def row_label(row: range) -> str:
    return str(row.start) if len(row) == 1 else f"{row.start}-{row.stop - 1}"
