"""The words and numbers on a picture, the same in every picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.pipeline.actions import COMPUTE, SENDS, Action, ActionKind
from echelon.pipeline.draw.action_colours import ACTION_STYLES
from echelon.pipeline.timeline import Timeline


def heading(timeline: Timeline) -> str:
    """What is drawn: `4 ranks, 8 microbatches, 2 chunks per rank`."""
    counts = [(timeline.ranks, "rank", ""), (timeline.microbatches, "microbatch", "")]
    counts += [(number, word, each) for number, word, each in _optional(timeline) if number > 1]
    return ", ".join(f"{number} {_plural(word, number)}{each}" for number, word, each in counts)


def _optional(timeline: Timeline) -> list[tuple[int, str, str]]:
    return [(1 + max(timeline.chunks), "chunk", " per rank"), (timeline.slices, "slice", " each")]


def _plural(word: str, number: int) -> str:
    return word if number == 1 else word + ("es" if word.endswith("ch") else "s")


def summary_figures(timeline: Timeline, seconds: bool, *, every_rank: bool = False) -> list[str]:
    """The numbers of a timeline; those that every rank has, one by one or the most of any."""
    found = [f"bubble {percent(timeline.bubble)}", _per_rank("in flight", timeline.in_flight, every_rank)]
    if max(timeline.weight_versions) > 1:
        found.append(_per_rank("versions of weights", timeline.weight_versions, every_rank))
    return [*found, f"duration {format_time(timeline.duration, seconds)}"]


def _per_rank(noun: str, counts: Sequence[int], every_rank: bool) -> str:
    if every_rank and len(counts) <= 16:
        return f"{noun} {' '.join(map(str, counts))}"
    return f"at most {max(counts)} {noun}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.01 or not share else f"{100 * share:.2g} %"


def caption(timeline: Timeline) -> str:
    return "measured" if timeline.measured else "planned"


def in_seconds(timelines: Sequence[Timeline]) -> bool:
    """Whether times are in seconds: beside a measurement they are, while a plan alone may count in any unit."""
    return any(timeline.measured for timeline in timelines)


def format_time(value: float, seconds: bool) -> str:
    if not seconds:
        return f"{value:.6g}"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs" if value else "0 s"


def label(action: Action) -> str:
    """What stands in a cell: the microbatch, with its slice."""
    if action.kind is ActionKind.UPDATE:
        return "U"
    return f"{action.index}.{action.slice_index}" if action.slice_index else str(action.index)


def drawn_kinds(timelines: Sequence[Timeline]) -> list[ActionKind]:
    """The kinds of cells that a picture of these timelines shows."""
    seen = {
        action.kind
        for timeline in timelines
        for rank in range(timeline.ranks)
        for action, start, end in timeline.spans(rank)
        if end > start or action.kind is ActionKind.UPDATE
    }
    return [kind for kind in ACTION_STYLES if kind in seen]


def has_transfers(timelines: Sequence[Timeline]) -> bool:
    """Whether there are messages that take time."""
    return any(
        action.kind in SENDS and end > start
        for timeline in timelines
        for rank in range(timeline.ranks)
        for action, start, end in timeline.spans(rank)
    )


def reference_duration(timelines: Sequence[Timeline]) -> float:
    """The cell that a picture should have room for: the shortest of a plan; the middle one of a measurement."""
    timeline = min(timelines, key=lambda timeline: timeline.measured)
    cells = sorted(
        end - start
        for rank in range(timeline.ranks)
        for action, start, end in timeline.spans(rank)
        if action.kind in COMPUTE and end > start
    )
    return cells[len(cells) // 2 if timeline.measured else 0] if cells else 1.0


def ticks(duration: float, max_ticks: int) -> list[float]:
    """Round times from 0 to `duration`, at most so many."""
    if duration <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(duration / max_ticks))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if duration / (power * factor) <= max_ticks)
    return [step * number for number in range(math.floor(duration / step * (1 + 1e-9)) + 1)]
