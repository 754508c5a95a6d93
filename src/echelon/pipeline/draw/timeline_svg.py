"""A timeline as SVG: one file, no fonts or scripts from elsewhere, for pages and papers.

[Note: room for text]

The fonts of the reader are unknown, so text gets the room that wide letters would need: 0.6 of its size for each. A
number that does not fit into its cell at a readable size is left out, and so are all of its length. Where cells are
narrower than a dot, the dots are drawn (see `columns`), so that the size of the file is bounded by that of the picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from echelon.pipeline.actions import COMPUTE, SENDS, Action, ActionKind
from echelon.pipeline.draw import action_colours, timeline_labels
from echelon.pipeline.draw.time_columns import column_spans
from echelon.pipeline.timeline import ActionSpan, Timeline

LEFT, RIGHT = 84.0, 76.0
"""beside the rows: names of ranks; activations in flight"""
ROW, GAP = 26.0, 6.0
CELL = 28.0
"""the width that the shortest cell would like"""
NARROWEST, WIDEST = 780.0, 2800.0
"""of the rows"""
LETTER_WIDTH = 0.6
TRANSFER = "message"
GREY, PALE = "#4a5366", "#6a7386"
"""text beside the main thing"""
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, kw_only=True)
class _TimelineFrame:
    """Where things go."""

    scale: float
    """dots for each second"""
    width: float
    """of the rows"""
    label_length: int
    """of the longest label"""
    with_transfers: bool
    is_squeezed: bool

    @property
    def full_width(self) -> float:
        return LEFT + self.width + RIGHT

    @property
    def row_pitch(self) -> float:
        """From one row to the next."""
        return ROW + GAP

    def height(self, timeline: Timeline) -> float:
        return self.row_pitch * timeline.ranks - GAP


def as_svg(planned: Timeline, measured: Timeline | None = None, *, in_seconds: bool = False) -> str:
    """The picture as the text of an SVG file; `in_seconds` where times are, though nothing was measured."""
    timelines = [planned] if measured is None else [planned, measured]
    frame, seconds = _frame(timelines), in_seconds or timeline_labels.in_seconds(timelines)
    about = timeline_labels.heading(planned)
    if len(timelines) == 1:
        about = " · ".join([about, *timeline_labels.summary_figures(planned, seconds)])
    parts, y = _header(planned, about, frame)
    legend, y = _legend(timelines, frame, y + 27)
    parts += legend
    for timeline in timelines:
        y += 34
        if len(timelines) > 1:
            caption = " · ".join(
                [timeline_labels.caption(timeline), *timeline_labels.summary_figures(timeline, seconds)]
            )
            parts.append(_text(24, y, caption, 14, weight=600))
        parts.append(_text(frame.full_width - 24, y, "in flight", 12, colour=PALE, anchor="end"))
        y += 12
        parts += _rank_rows(timeline, frame, y)
        y += frame.height(timeline)
    parts += _axis(timelines, frame, y + 8, seconds)
    y += 52
    style = "".join(f".{name}{{fill:{colour}}}" for name, colour in _classes(timelines).items())
    title = f"{planned.name}: {about}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame.full_width:.0f}" height="{y:.0f}" '
        f'viewBox="0 0 {frame.full_width:.0f} {y:.0f}" font-family="{FONT}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{style}.n{{text-anchor:middle;dominant-baseline:central;font-variant-numeric:tabular-nums}}</style>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _header(planned: Timeline, about: str, frame: _TimelineFrame) -> tuple[list[str], float]:
    """Title, numbers and note, each on as many lines as it needs; and where the last line is."""
    parts: list[str] = []
    y = 12.0
    texts = (planned.name, 22, 650, action_colours.DARK_INK), (about, 14, 400, GREY), (planned.note, 13, 400, GREY)
    for text, size, weight, colour in texts:
        for line in textwrap.wrap(text, int((frame.full_width - 48) / (size * LETTER_WIDTH))):
            y += 8 + size
            parts.append(_text(24, y, line, size, weight=weight, colour=colour))
    return parts, y


def _frame(timelines: Sequence[Timeline]) -> _TimelineFrame:
    duration = max(timeline.duration for timeline in timelines) or 1.0
    width = min(WIDEST, max(NARROWEST, CELL * duration / timeline_labels.reference_duration(timelines)))
    actions = (action for timeline in timelines for actions in timeline.rank_actions for action in actions)
    return _TimelineFrame(
        scale=width / duration,
        width=width,
        label_length=max(map(_label_length, actions), default=1),
        with_transfers=timeline_labels.has_transfers(timelines),
        is_squeezed=timeline_labels.reference_duration(timelines) * width / duration < 1,
    )


def _classes(timelines: Sequence[Timeline]) -> dict[str, str]:
    """A class for the colour of every kind and chunk, and one for the ink on it."""
    chunks = max(1 + max(timeline.chunks) for timeline in timelines)
    found = {}
    for kind in timeline_labels.drawn_kinds(timelines):
        for chunk in range(chunks):
            found[f"{kind}{chunk}"] = action_colours.cell_colour(kind, chunk, chunks)
            found[f"t{kind}{chunk}"] = action_colours.text_colour(action_colours.cell_colour(kind, chunk, chunks))
    return found


def _legend(timelines: Sequence[Timeline], frame: _TimelineFrame, y: float) -> tuple[list[str], float]:
    """The entries from left to right, on as many lines as they need; and where the last line is."""
    chunks = max(1 + max(timeline.chunks) for timeline in timelines)
    entries = [
        ([f'class="{kind}0"'], action_colours.ACTION_STYLES[kind].name)
        for kind in timeline_labels.drawn_kinds(timelines)
    ]
    entries.append(([f'fill="{action_colours.IDLE_COLOUR}"'], "idle"))
    if chunks > 1:
        entries.append(([f'class="F{chunk}"' for chunk in range(chunks)], "first to last chunk of a rank"))
    if frame.with_transfers:
        entries.append(([f'fill="{action_colours.TRANSFER_COLOUR}"'], TRANSFER))
    parts: list[str] = []
    x = 24.0
    for swatches, name in entries:
        room = 18 * len(swatches) + 6 + 13 * LETTER_WIDTH * len(name) + 14
        if x > 24 and x + room > frame.full_width:
            x, y = 24.0, y + 22
        for number, look in enumerate(swatches):
            top, height = (y - 6, 3) if name == TRANSFER else (y - 11, 14)
            shape = f'x="{x + 18 * number:g}" y="{top:g}" width="16" height="{height}"'
            parts.append(f'<rect {shape} rx="{height / 5:g}" {look}/>')
        parts.append(_text(x + 18 * len(swatches) + 4, y, name, 13, colour=GREY))
        x += room
    return parts, y


def _label_length(action: Action) -> int:
    return len(timeline_labels.label(action)) if action.kind in COMPUTE else 0


def _rank_rows(timeline: Timeline, frame: _TimelineFrame, top: float) -> Iterator[str]:
    for rank in range(timeline.ranks):
        y = top + frame.row_pitch * rank
        yield _text(LEFT - 12, y + ROW / 2, f"rank {rank}", 13, anchor="end", baseline="central")
        yield _text(
            frame.full_width - 24,
            y + ROW / 2,
            str(timeline.in_flight[rank]),
            13,
            colour=GREY,
            anchor="end",
            baseline="central",
        )
        yield f'<rect x="{LEFT:g}" y="{y:g}" width="{frame.width:g}" height="{ROW:g}" rx="3" fill="{action_colours.IDLE_COLOUR}"/>'
        yield from _cells(timeline, rank, frame, y)


def _cells(timeline: Timeline, rank: int, frame: _TimelineFrame, y: float) -> Iterator[str]:
    numbers: list[str] = []
    for action, start, end in _squeezed_spans(timeline, rank, frame) if frame.is_squeezed else timeline.spans(rank):
        x, width = LEFT + start * frame.scale, (end - start) * frame.scale
        if action.kind in SENDS and width:
            yield f'<rect x="{x:.2f}" y="{y + ROW + 1.5:g}" width="{width:.2f}" height="3" fill="{action_colours.TRANSFER_COLOUR}"/>'
        if action.kind not in action_colours.ACTION_STYLES:
            continue
        name = f"{action.kind}{timeline.chunks[action.stage]}"
        if not width:
            if action.kind is ActionKind.UPDATE:
                yield f'<rect class="{name}" x="{x - 1:.2f}" y="{y - 2:g}" width="2" height="{ROW + 4:g}"/>'
            continue
        edge = 0.0 if frame.is_squeezed else min(1.0, width / 8)
        shape = f'y="{y:g}" width="{width - edge:.2f}" height="{ROW:g}"'
        round_ = f' rx="{min(3.0, width / 4):.1f}"' if edge else ""
        yield f'<rect class="{name}" x="{x + edge / 2:.2f}" {shape}{round_}/>'
        size = min(12.0, (width - 2) / (LETTER_WIDTH * frame.label_length))
        if size >= 7 and not frame.is_squeezed:
            where = f'x="{x + width / 2:.2f}" y="{y + ROW / 2:g}" font-size="{size:.3g}"'
            numbers.append(f'<text class="n t{name}" {where}>{timeline_labels.label(action)}</text>')
    yield from numbers


def _squeezed_spans(timeline: Timeline, rank: int, frame: _TimelineFrame) -> Iterator[ActionSpan]:
    """Runs of dots of one kind."""
    dots = column_spans(timeline, rank, frame.scale, round(frame.width), True)
    place = 0
    for kind, group in groupby(dots, key=lambda span: span and (span.action.kind, span.action.stage)):
        spans = list(group)
        if kind and spans[0]:
            yield ActionSpan(spans[0].action, place / frame.scale, (place + len(spans)) / frame.scale)
        place += len(spans)


def _axis(timelines: Sequence[Timeline], frame: _TimelineFrame, y: float, seconds: bool) -> Iterator[str]:
    duration = max(timeline.duration for timeline in timelines)
    yield f'<path d="M{LEFT:g} {y:g}h{frame.width:g}" stroke="#c3c9d4"/>'
    for tick in timeline_labels.ticks(duration, int(frame.width / 90)):
        x = LEFT + tick * frame.scale
        yield f'<path d="M{x:.2f} {y:g}v5" stroke="#c3c9d4"/>'
        yield _text(x, y + 18, timeline_labels.format_time(tick, seconds), 12, colour=PALE, anchor="middle")


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    *,
    colour: str = action_colours.DARK_INK,
    weight: int = 400,
    anchor: str = "",
    baseline: str = "",
) -> str:
    more = f' font-weight="{weight}"' if weight != 400 else ""
    more += f' text-anchor="{anchor}"' if anchor else ""
    more += f' dominant-baseline="{baseline}"' if baseline else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{more}>{escape(text)}</text>'
