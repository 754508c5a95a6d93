"""Headings, legends and figures of a timeline, the same in text, SVG and HTML."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.draw.number_format import format_time, percent
from echelon.pipeline.actions import COMPUTE, SENDS, Action, ActionKind
from echelon.pipeline.draw.action_colours import ACTION_STYLES
from echelon.pipeline.timeline import Timeline


def heading(timeline: Timeline) -> str:
    """The sizes of a timeline: `4 ranks, 8 microbatches, 2 chunks per rank`."""
    counts = [(timeline.ranks, "rank", ""), (timeline.microbatches, "microbatch", "")]
    counts += [(number, word, each) for number, word, each in _optional(timeline) if number > 1]
    return ", ".join(f"{number} {_plural(word, number)}{each}" for number, word, each in counts)


def _optional(timeline: Timeline) -> list[tuple[int, str, str]]:
    return [(1 + max(timeline.chunks), "chunk", " per rank"), (timeline.slices, "slice", " each")]


def _plural(word: str, number: int) -> str:
    return word if number == 1 else word + ("es" if word.endswith("ch") else "s")


def summary_figures(timeline: Timeline, seconds: bool, *, every_rank: bool = False) -> list[str]:
    """Bubble, activations in flight, weight versions and duration; per rank, or the maximum over ranks."""
    found = [f"bubble {percent(timeline.bubble)}", _per_rank("in flight", timeline.in_flight, every_rank)]
    if max(timeline.weight_versions) > 1:
        found.append(_per_rank("versions of weights", timeline.weight_versions, every_rank))
    return [*found, f"duration {format_time(timeline.duration, seconds)}"]


def _per_rank(noun: str, counts: Sequence[int], every_rank: bool) -> str:
    if every_rank and len(counts) <= 16:
        return f"{noun} {' '.join(map(str, counts))}"
    return f"at most {max(counts)} {noun}"


def caption(timeline: Timeline) -> str:
    return "measured" if timeline.measured else "planned"


def in_seconds(timelines: Sequence[Timeline]) -> bool:
    """Whether times are in seconds: measured ones are; a planned timeline alone may be in any unit."""
    return any(timeline.measured for timeline in timelines)


def label(action: Action) -> str:
    """The label of a cell: the microbatch, and its slice."""
    if action.kind is ActionKind.UPDATE:
        return "U"
    return f"{action.index}.{action.slice_index}" if action.slice_index else str(action.index)


def drawn_kinds(timelines: Sequence[Timeline]) -> list[ActionKind]:
    """The kinds of actions that a picture of these timelines shows as cells."""
    seen = {
        action.kind
        for timeline in timelines
        for rank in range(timeline.ranks)
        for action, start, end in timeline.spans(rank)
        if end > start or action.kind is ActionKind.UPDATE
    }
    return [kind for kind in ACTION_STYLES if kind in seen]


def has_transfers(timelines: Sequence[Timeline]) -> bool:
    """Whether some transfer takes time."""
    return any(
        action.kind in SENDS and end > start
        for timeline in timelines
        for rank in range(timeline.ranks)
        for action, start, end in timeline.spans(rank)
    )


def reference_duration(timelines: Sequence[Timeline]) -> float:
    """The duration that sets the scale of a picture: the shortest action of a plan, the median of a measurement."""
    timeline = min(timelines, key=lambda timeline: timeline.measured)
    cells = sorted(
        end - start
        for rank in range(timeline.ranks)
        for action, start, end in timeline.spans(rank)
        if action.kind in COMPUTE and end > start
    )
    return cells[len(cells) // 2 if timeline.measured else 0] if cells else 1.0
