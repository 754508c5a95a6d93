"""Headings, legends and figures of a timeline, the same in text, SVG and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.draw.number_format import format_time, percent
from echelon.pipeline.actions import COMPUTE, SENDS, Action, ActionKind
from echelon.pipeline.draw.action_colours import ACTION_STYLES
from echelon.pipeline.timeline import ActionSpan, Timeline


def heading(timeline: Timeline) -> str:
    """The sizes of a timeline: `4 ranks, 8 microbatches, 2 chunks per rank`."""
    counts = [(timeline.ranks, "rank", "s", ""), (timeline.microbatches, "microbatch", "es", "")]
    optional = [(num_chunks([timeline]), "chunk", "s", " per rank"), (timeline.slices, "slice", "s", " each")]
    counts += [count for count in optional if count[0] > 1]
    return ", ".join(f"{number} {word}{'' if number == 1 else plural}{each}" for number, word, plural, each in counts)


def summary_figures(timeline: Timeline, seconds: bool, *, every_rank: bool = False) -> list[str]:
    """Bubble, activations in flight, weight versions and duration; per rank, or the maximum over ranks."""
    figures = [f"bubble {percent(timeline.bubble)}", _per_rank("in flight", timeline.in_flight, every_rank)]
    if max(timeline.weight_versions) > 1:
        figures.append(_per_rank("versions of weights", timeline.weight_versions, every_rank))
    return [*figures, f"duration {format_time(timeline.duration, seconds)}"]


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


def num_chunks(timelines: Sequence[Timeline]) -> int:
    """The most chunks that a rank holds."""
    return max(1 + max(timeline.chunks) for timeline in timelines)


def timed_kinds(timelines: Sequence[Timeline]) -> set[ActionKind]:
    """The kinds of actions that take time."""
    return {span.action.kind for timeline in timelines for span in _timed_spans(timeline)}


def drawn_kinds(timelines: Sequence[Timeline]) -> list[ActionKind]:
    """The kinds of actions that a picture of these timelines shows as cells: updates even if they take no time."""
    drawn = timed_kinds(timelines)
    actions = (action for timeline in timelines for actions in timeline.rank_actions for action in actions)
    if any(action.kind is ActionKind.UPDATE for action in actions):
        drawn.add(ActionKind.UPDATE)
    return [kind for kind in ACTION_STYLES if kind in drawn]


def has_transfers(timelines: Sequence[Timeline]) -> bool:
    """Whether some transfer takes time."""
    return not timed_kinds(timelines).isdisjoint(SENDS)


def reference_duration(timelines: Sequence[Timeline]) -> float:
    """The duration that sets the scale of a picture: the shortest action of a plan, the median of a measurement."""
    timeline = min(timelines, key=lambda timeline: timeline.measured)
    cells = sorted(end - start for action, start, end in _timed_spans(timeline) if action.kind in COMPUTE)
    return cells[len(cells) // 2 if timeline.measured else 0] if cells else 1.0


def _timed_spans(timeline: Timeline) -> Iterator[ActionSpan]:
    return (span for rank in range(timeline.ranks) for span in timeline.spans(rank) if span.end > span.start)
