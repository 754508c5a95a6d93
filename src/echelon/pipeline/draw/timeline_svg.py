"""A timeline as SVG, for pages and papers.

A microbatch number that does not fit into its cell at a readable size is left out, and so are all numbers of its
length. Where cells are narrower than a pixel, each pixel is drawn once (see `time_columns`), so that the size of the
picture bounds that of the file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from echelon.draw import svg_writer
from echelon.draw.number_format import format_time, ticks
from echelon.pipeline.actions import COMPUTE, SENDS, ActionKind
from echelon.pipeline.draw import action_colours
from echelon.pipeline.draw import timeline_labels as labels
from echelon.pipeline.draw.action_colours import DARK_INK
from echelon.pipeline.draw.time_columns import column_spans
from echelon.pipeline.timeline import ActionSpan, Timeline

LEFT, RIGHT = 84.0, 76.0
"""margins: rank names; activations in flight"""
ROW, GAP = 26.0, 6.0
ROW_PITCH = ROW + GAP
CELL = 28.0
"""the preferred width of the shortest cell"""
NARROWEST, WIDEST = 780.0, 2800.0
"""of the rows"""
TRANSFER = "message"
GREY, PALE = "#4a5366", "#6a7386"
"""secondary text"""
NUMBER_STYLE = ".n{text-anchor:middle;dominant-baseline:central;font-variant-numeric:tabular-nums}"


@dataclass(frozen=True, kw_only=True)
class _TimelineFrame:
    """The coordinates of a picture."""

    scale: float
    """pixels per second"""
    width: float
    """of the rows"""
    label_length: int
    """of the longest label, in letters"""
    with_transfers: bool
    is_squeezed: bool

    @property
    def full_width(self) -> float:
        return LEFT + self.width + RIGHT


def as_svg(planned: Timeline, measured: Timeline | None = None, *, in_seconds: bool = False) -> str:
    """Draw one timeline, or planned over measured; `in_seconds` if a planned timeline is in seconds."""
    timelines = [planned] if measured is None else [planned, measured]
    frame, seconds = _frame(timelines), in_seconds or labels.in_seconds(timelines)
    about = labels.heading(planned)
    if len(timelines) == 1:
        about = " · ".join([about, *labels.summary_figures(planned, seconds)])
    parts, y = _header(planned, about, frame)
    legend, y = _legend(timelines, frame, y + 27)
    parts += legend
    for timeline in timelines:
        y += 34
        if len(timelines) > 1:
            caption = " · ".join([labels.caption(timeline), *labels.summary_figures(timeline, seconds)])
            parts.append(svg_writer.text(24, y, caption, 14, weight=600, fill=DARK_INK))
        parts.append(svg_writer.text(frame.full_width - 24, y, "in flight", 12, fill=PALE, anchor="end"))
        y += 12
        parts += _rank_rows(timeline, frame, y)
        y += ROW_PITCH * timeline.ranks - GAP
    parts += _axis(timelines, frame, y + 8, seconds)
    y += 52
    style, title = svg_writer.fill_classes(_classes(timelines)) + NUMBER_STYLE, f"{planned.name}: {about}"
    return svg_writer.document(parts, frame.full_width, y, title=title, style=style, background=svg_writer.WHITE)


def _header(planned: Timeline, about: str, frame: _TimelineFrame) -> tuple[list[str], float]:
    """Title, figures and note, wrapped; and the y of the last line."""
    parts: list[str] = []
    y = 12.0
    texts = (planned.name, 22, 650, DARK_INK), (about, 14, 400, GREY), (planned.note, 13, 400, GREY)
    for text, size, weight, colour in texts:
        for line in textwrap.wrap(text, int((frame.full_width - 48) / (size * svg_writer.LETTER_WIDTH))):
            y += 8 + size
            parts.append(svg_writer.text(24, y, line, size, weight=weight, fill=colour))
    return parts, y


def _frame(timelines: Sequence[Timeline]) -> _TimelineFrame:
    duration = max(timeline.duration for timeline in timelines) or 1.0
    width = min(WIDEST, max(NARROWEST, CELL * duration / labels.reference_duration(timelines)))
    actions = (action for timeline in timelines for actions in timeline.rank_actions for action in actions)
    return _TimelineFrame(
        scale=width / duration,
        width=width,
        label_length=max((len(labels.label(action)) for action in actions if action.kind in COMPUTE), default=1),
        with_transfers=labels.has_transfers(timelines),
        is_squeezed=labels.reference_duration(timelines) * width / duration < 1,
    )


def _classes(timelines: Sequence[Timeline]) -> dict[str, str]:
    """CSS classes: a cell colour for every kind and chunk, and the colour of text on it."""
    chunks = labels.num_chunks(timelines)
    classes = {}
    for kind in labels.drawn_kinds(timelines):
        for chunk in range(chunks):
            colour = classes[f"{kind}{chunk}"] = action_colours.cell_colour(kind, chunk, chunks)
            classes[f"t{kind}{chunk}"] = action_colours.text_colour(colour)
    return classes


def _legend(timelines: Sequence[Timeline], frame: _TimelineFrame, y: float) -> tuple[list[str], float]:
    """The legend, wrapped; and the y of its last line."""
    chunks = labels.num_chunks(timelines)
    kinds = labels.drawn_kinds(timelines)
    entries = [([f'class="{kind}0"'], action_colours.ACTION_STYLES[kind].name) for kind in kinds]
    entries.append(([f'fill="{action_colours.IDLE_COLOUR}"'], "idle"))
    if chunks > 1:
        entries.append(([f'class="F{chunk}"' for chunk in range(chunks)], "first to last chunk of a rank"))
    if frame.with_transfers:
        entries.append(([f'fill="{action_colours.TRANSFER_COLOUR}"'], TRANSFER))
    parts: list[str] = []
    x = 24.0
    for swatches, name in entries:
        width = 18 * len(swatches) + 6 + svg_writer.text_width(name, 13) + 14
        if x > 24 and x + width > frame.full_width:
            x, y = 24.0, y + 22
        for number, paint in enumerate(swatches):
            top, height = (y - 6, 3) if name == TRANSFER else (y - 11, 14)
            shape = f'x="{x + 18 * number:g}" y="{top:g}" width="16" height="{height}"'
            parts.append(f'<rect {shape} rx="{height / 5:g}" {paint}/>')
        parts.append(svg_writer.text(x + 18 * len(swatches) + 4, y, name, 13, fill=GREY))
        x += width
    return parts, y


def _rank_rows(timeline: Timeline, frame: _TimelineFrame, top: float) -> Iterator[str]:
    for rank in range(timeline.ranks):
        y = top + ROW_PITCH * rank
        right, middle, in_flight = frame.full_width - 24, y + ROW / 2, str(timeline.in_flight[rank])
        yield svg_writer.text(LEFT - 12, middle, f"rank {rank}", 13, fill=DARK_INK, anchor="end", baseline="central")
        yield svg_writer.text(right, middle, in_flight, 13, fill=GREY, anchor="end", baseline="central")
        shape = f'x="{LEFT:g}" y="{y:g}" width="{frame.width:g}" height="{ROW:g}"'
        yield f'<rect {shape} rx="3" fill="{action_colours.IDLE_COLOUR}"/>'
        yield from _cells(timeline, rank, frame, y)


def _cells(timeline: Timeline, rank: int, frame: _TimelineFrame, y: float) -> Iterator[str]:
    numbers: list[str] = []
    for action, start, end in _squeezed_spans(timeline, rank, frame) if frame.is_squeezed else timeline.spans(rank):
        x, width = LEFT + start * frame.scale, (end - start) * frame.scale
        if action.kind in SENDS and width:
            shape = f'x="{x:.2f}" y="{y + ROW + 1.5:g}" width="{width:.2f}" height="3"'
            yield f'<rect {shape} fill="{action_colours.TRANSFER_COLOUR}"/>'
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
        size = min(12.0, (width - 2) / (svg_writer.LETTER_WIDTH * frame.label_length))
        if size >= 7 and not frame.is_squeezed:
            where = f'x="{x + width / 2:.2f}" y="{y + ROW / 2:g}" font-size="{size:.3g}"'
            numbers.append(f'<text class="n t{name}" {where}>{labels.label(action)}</text>')
    yield from numbers


def _squeezed_spans(timeline: Timeline, rank: int, frame: _TimelineFrame) -> Iterator[ActionSpan]:
    """Runs of pixels of one kind."""
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
    for tick in ticks(duration, int(frame.width / 90)):
        x = LEFT + tick * frame.scale
        yield f'<path d="M{x:.2f} {y:g}v5" stroke="#c3c9d4"/>'
        yield svg_writer.text(x, y + 18, format_time(tick, seconds), 12, fill=PALE, anchor="middle")
