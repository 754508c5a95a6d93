"""A timeline as an HTML page with zoom, pan and hover. `timeline.html` is its template.

The page draws only what is visible, on a canvas, so that it can show a million actions. Its data are columns, not
objects: for every rank the texts, starts and ends of its actions.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from echelon.draw.html_page import fill_template
from echelon.pipeline.actions import ActionKind
from echelon.pipeline.draw import action_colours
from echelon.pipeline.draw import timeline_labels as labels
from echelon.pipeline.timeline import Timeline

TEMPLATE = "timeline.html"


def as_html(planned: Timeline, measured: Timeline | None = None) -> str:
    """The text of the HTML file."""
    timelines = [planned] if measured is None else [planned, measured]
    data = {
        "name": planned.name,
        "heading": labels.heading(planned),
        "note": planned.note,
        "duration": max(timeline.duration for timeline in timelines),
        "cell": labels.reference_duration(timelines),
        "seconds": labels.in_seconds(timelines),
        "looks": [_style(kind, labels.num_chunks(timelines)) for kind in labels.drawn_kinds(timelines)],
        "idle": action_colours.IDLE_COLOUR,
        "link": action_colours.TRANSFER_COLOUR if labels.has_transfers(timelines) else "",
        "panels": [_panel(timeline, timelines) for timeline in timelines],
    }
    title = escape(f"{planned.name}: {labels.heading(planned)}")
    return fill_template(__package__, TEMPLATE, data, {"TITLE": title})


def _style(kind: ActionKind, chunks: int) -> dict[str, Any]:
    fills = [action_colours.cell_colour(kind, chunk, chunks) for chunk in range(chunks)]
    inks = list(map(action_colours.text_colour, fills))
    return {"kind": kind, "name": action_colours.ACTION_STYLES[kind].name, "fills": fills, "inks": inks}


def _panel(timeline: Timeline, timelines: list[Timeline]) -> dict[str, Any]:
    # A millionth of the duration is finer than any zoom; further digits would be most of the file.
    digits = 7 - math.floor(math.log10(timeline.duration)) if timeline.duration else 0
    return {
        "caption": labels.caption(timeline) if len(timelines) > 1 else "",
        "figures": labels.summary_figures(timeline, labels.in_seconds(timelines)),
        "chunks": timeline.chunks,
        "inFlight": timeline.in_flight,
        "ranks": [
            {
                "actions": " ".join(map(str, timeline.rank_actions[rank])),
                "starts": [round(start, digits) for start in timeline.starts[rank]],
                "ends": [round(end, digits) for end in timeline.ends[rank]],
            }
            for rank in range(timeline.ranks)
        ],
    }
