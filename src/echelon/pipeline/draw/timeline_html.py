"""A timeline as an HTML page with zoom, pan and hover. `timeline.html` is its template.

The page draws only what is visible, on a canvas, so that it can show a million actions. Its data are columns, not
objects: for every rank the texts, starts and ends of its actions.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from echelon.draw.html_page import fill_template
from echelon.pipeline.draw import action_colours, timeline_labels
from echelon.pipeline.timeline import Timeline

TEMPLATE = "timeline.html"


def as_html(planned: Timeline, measured: Timeline | None = None) -> str:
    """The text of the HTML file."""
    timelines = [planned] if measured is None else [planned, measured]
    data = {
        "name": planned.name,
        "heading": timeline_labels.heading(planned),
        "note": planned.note,
        "duration": max(timeline.duration for timeline in timelines),
        "cell": timeline_labels.reference_duration(timelines),
        "seconds": timeline_labels.in_seconds(timelines),
        "looks": _styles(timelines),
        "idle": action_colours.IDLE_COLOUR,
        "link": action_colours.TRANSFER_COLOUR if timeline_labels.has_transfers(timelines) else "",
        "panels": [_panel(timeline, timelines) for timeline in timelines],
    }
    title = escape(f"{planned.name}: {timeline_labels.heading(planned)}")
    return fill_template(__package__, TEMPLATE, data, {"TITLE": title})


def _styles(timelines: list[Timeline]) -> list[dict[str, Any]]:
    chunks = max(1 + max(timeline.chunks) for timeline in timelines)
    fills = {
        kind: [action_colours.cell_colour(kind, chunk, chunks) for chunk in range(chunks)]
        for kind in timeline_labels.drawn_kinds(timelines)
    }
    return [
        {
            "kind": kind,
            "name": action_colours.ACTION_STYLES[kind].name,
            "fills": fills[kind],
            "inks": list(map(action_colours.text_colour, fills[kind])),
        }
        for kind in fills
    ]


def _panel(timeline: Timeline, timelines: list[Timeline]) -> dict[str, Any]:
    # A millionth of the duration is finer than any zoom; further digits would be most of the file.
    digits = 7 - math.floor(math.log10(timeline.duration)) if timeline.duration else 0
    return {
        "caption": timeline_labels.caption(timeline) if len(timelines) > 1 else "",
        "figures": timeline_labels.summary_figures(timeline, timeline_labels.in_seconds(timelines)),
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
