"""A timeline as text: a row for each rank, time to the right, as wide as the terminal.

The width of a cell is its duration. If the shortest cell is at least a column wide, it is a whole number of columns, so
that equal actions are equally wide, and cells show their microbatch where it fits. Otherwise time is squeezed into the
width (`time_columns`), and single actions are not shown.

Without colour a cell is a letter, the microbatch and dashes: `F3B3--`; the second, fourth, … chunk of a rank has small
letters. The text is plain ASCII.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from echelon.pipeline.actions import ActionKind
from echelon.pipeline.draw import action_colours
from echelon.pipeline.draw import timeline_labels as labels
from echelon.pipeline.draw.time_columns import column_spans
from echelon.pipeline.timeline import ActionSpan, Timeline

MAX_CELL_WIDTH = 6
"""of the shortest cell, in columns"""


def as_text(planned: Timeline, measured: Timeline | None = None, *, width: int = 80, colour: bool = True) -> Text:
    """The timeline with a legend and a line of figures."""
    timelines = [planned] if measured is None else [planned, measured]
    seconds = labels.in_seconds(timelines)
    margin = len(f"rank {max(timeline.ranks for timeline in timelines) - 1} ")
    columns, scale, squeezed = _scale(timelines, max(8, width - margin))
    text, bold = Text(no_wrap=True, overflow="crop"), "bold" if colour else ""
    text.append(planned.name, style=bold).append(f": {labels.heading(planned)}\n")
    for timeline in timelines:
        if len(timelines) > 1:
            text.append(f"{labels.caption(timeline)}: {_summary(timeline, seconds)}\n", style=bold)
        for rank in range(timeline.ranks):
            spans = column_spans(timeline, rank, scale, columns, squeezed)
            text.append(f"{f'rank {rank}':<{margin}}").append(_rank_row(timeline, spans, colour, squeezed)).append("\n")
    text.append(_legend(timelines, colour)).append("\n")
    if len(timelines) == 1:
        text.append(f"{_summary(planned, seconds)}\n", style=bold)
    if planned.note:
        text.append(f"note: {planned.note}\n")
    return text


def _summary(timeline: Timeline, seconds: bool) -> str:
    return ", ".join(labels.summary_figures(timeline, seconds, every_rank=True)).replace("µ", "u")


def _scale(timelines: Sequence[Timeline], max_columns: int) -> tuple[int, float, bool]:
    """(columns of the picture, columns per second, whether single actions are lost)."""
    duration = max(timeline.duration for timeline in timelines)
    if not duration:
        return max_columns, 1.0, False
    cell = labels.reference_duration(timelines)
    whole = min(MAX_CELL_WIDTH, math.floor(max_columns * cell / duration * (1 + 1e-9)))
    scale = whole / cell if whole else max_columns / duration
    return min(max_columns, math.ceil(duration * scale - 1e-6)), scale, not whole


def _rank_row(timeline: Timeline, columns: Sequence[ActionSpan | None], colour: bool, squeezed: bool) -> Text:
    row, chunks = Text(), labels.num_chunks([timeline])
    for _, group in groupby(columns, key=id):
        cells = list(group)
        span, width = cells[0], len(cells)
        if span is None:
            row.append((" " if colour else ".") * width)
            continue
        kind, chunk = span.action.kind, timeline.chunks[span.action.stage]
        name = "" if squeezed else labels.label(span.action)
        if not colour:
            letter = kind.lower() if chunk % 2 else str(kind)
            text = letter + name if len(name) < width and kind is not ActionKind.UPDATE else letter
            row.append(letter * width if squeezed else text.ljust(width, "-"))
            continue
        back = action_colours.cell_colour(kind, chunk, chunks)
        text = name.center(width) if width > len(name) + 1 else name.ljust(width)
        # Numbers that fill their cells would merge: every second one is bold.
        bold = "bold " if span.action.index % 2 else ""
        style = f"{bold}{action_colours.text_colour(back)} on {back}"
        row.append(text if len(name) <= width else " " * width, style=style)
    return row


def _legend(timelines: Sequence[Timeline], colour: bool) -> Text:
    chunks, timed = labels.num_chunks(timelines), labels.timed_kinds(timelines)
    text = Text()
    for kind in labels.drawn_kinds(timelines):
        if kind not in timed:
            continue
        look = action_colours.ACTION_STYLES[kind]
        style = f"bold {action_colours.text_colour(look.colour)} on {look.colour}" if colour else ""
        text.append(f" {kind} " if colour else str(kind), style=style).append(f" {look.name}  ")
    text.append("empty: idle" if colour else ". idle")
    if chunks > 1 and colour:
        text.append("  chunks ")
        for chunk in range(chunks):
            back = action_colours.cell_colour(ActionKind.FORWARD, chunk, chunks)
            text.append(f" {chunk} ", style=f"{action_colours.text_colour(back)} on {back}")
    elif chunks > 1:
        text.append(f"  small letters: chunk{'s' if chunks > 3 else ''} {' '.join(map(str, range(1, chunks, 2)))}")
    return text
