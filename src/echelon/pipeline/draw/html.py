"""A timeline as a page: one file that needs no network, with zoom, pan and hover. `page.html` is the page.

The page draws on a canvas what is in sight, so that a million actions can be looked at. It gets columns, not objects:
for every rank the texts of its actions, and their starts and ends.
"""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from typing import Any

from echelon.pipeline.draw import colours, words
from echelon.pipeline.timeline import Timeline

TEMPLATE = "page.html"


def as_html(planned: Timeline, measured: Timeline | None = None) -> str:
    """The page as the text of an HTML file."""
    timelines = [planned] if measured is None else [planned, measured]
    data = {
        "name": planned.name,
        "heading": words.heading(planned),
        "note": planned.note,
        "duration": max(timeline.duration for timeline in timelines),
        "cell": words.shortest(timelines),
        "seconds": words.in_seconds(timelines),
        "looks": _looks(timelines),
        "idle": colours.IDLE,
        "link": colours.LINK if words.shows_links(timelines) else "",
        "panels": [_panel(timeline, timelines) for timeline in timelines],
    }
    # Inside a script, only "</" could end it.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    before, data_mark, after = page.partition('"DATA"')
    assert data_mark
    return before.replace("TITLE", escape(f"{planned.name}: {words.heading(planned)}")) + text + after


def _looks(timelines: list[Timeline]) -> list[dict[str, Any]]:
    chunks = max(1 + max(timeline.chunks) for timeline in timelines)
    fills = {kind: [colours.fill(kind, chunk, chunks) for chunk in range(chunks)] for kind in words.kinds(timelines)}
    return [
        {
            "kind": kind,
            "name": colours.LOOKS[kind].name,
            "fills": fills[kind],
            "inks": list(map(colours.ink, fills[kind])),
        }
        for kind in fills
    ]


def _panel(timeline: Timeline, timelines: list[Timeline]) -> dict[str, Any]:
    # A millionth of the picture is finer than any zoom; the digits behind it are most of the file.
    digits = 7 - math.floor(math.log10(timeline.duration)) if timeline.duration else 0
    return {
        "caption": words.caption(timeline) if len(timelines) > 1 else "",
        "figures": words.figures(timeline, words.in_seconds(timelines)),
        "chunks": timeline.chunks,
        "inFlight": timeline.in_flight,
        "ranks": [
            {
                "actions": " ".join(map(str, timeline.lists[rank])),
                "starts": [round(start, digits) for start in timeline.starts[rank]],
                "ends": [round(end, digits) for end in timeline.ends[rank]],
            }
            for rank in range(timeline.ranks)
        ],
    }
