"""A rank's timeline in columns, where a picture has too few pixels for every action.

A column shows what the rank did for most of it. Where columns are longer than actions (the picture is squeezed), that
would hide the shorter kinds everywhere: then each column shows one of its kinds, such that over a few columns each kind
gets its share. Such a picture shows where forward, backward and bubbles are, but no single action.
"""

from __future__ import annotations

import math

from echelon.pipeline.actions import ActionKind
from echelon.pipeline.draw.action_colours import ACTION_STYLES
from echelon.pipeline.timeline import ActionSpan, Timeline


def column_spans(
    timeline: Timeline, rank: int, scale: float, columns: int, is_squeezed: bool
) -> list[ActionSpan | None]:
    """The action that every column shows; None where the rank is idle."""
    shares: list[dict[ActionKind | None, float]] = [{None: 1.0} for _ in range(columns)]
    largest: list[dict[ActionKind, tuple[float, ActionSpan]]] = [{} for _ in range(columns)]
    for span in timeline.spans(rank):
        kind = span.action.kind
        if kind not in ACTION_STYLES or span.end <= span.start:
            continue
        start, end = span.start * scale, span.end * scale
        for column in range(int(start), min(columns, math.ceil(end))):
            share = min(end, column + 1) - max(start, column)
            shares[column][kind] = shares[column].get(kind, 0.0) + share
            shares[column][None] -= share
            if share > largest[column].get(kind, (0.0, span))[0]:
                largest[column][kind] = share, span
    shown: list[ActionSpan | None] = []
    owed: dict[ActionKind | None, float] = {}
    for share_of, largest_of in zip(shares, largest, strict=True):
        # In a squeezed picture, the share that a column does not show carries over to the next.
        owed = {kind: share + owed.get(kind, 0.0) for kind, share in share_of.items() if share > 1e-6}
        choice = max(owed, key=lambda kind: owed[kind])
        owed = {**owed, choice: owed[choice] - 1} if is_squeezed else {}
        shown.append(None if choice is None else largest_of[choice][1])
    return shown
