"""`Timeline`: when every action of every rank began and ended, planned by `simulate` or measured by a run.

[Note: figures of a timeline]

- the duration is the makespan: from the first start to the last end, over all ranks;
- the bubble is 1 - busy / (ranks x duration), where only F, B, I and W count as busy: a rank that sends, waits or
  updates is idle;
- in flight are the activations that a rank holds at once: of a stage, a microbatch and a slice, from F to B, or to W
  where backward is split, because W uses them.

A window of an endless stream begins with backwards whose forwards ran in an earlier window, and drops weights that were
stashed there: those count from the start.

As JSON a timeline is one object. `write_timelines` and `read_timelines` store two of them, planned and measured, in a
run's directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from echelon.input_file import MIB, InputFileError, read_json
from echelon.pipeline.actions import BACKWARD, COMPUTE, FORWARD, WEIGHT_GRAD, Action, ActionKind
from echelon.pipeline.schedule import RankActions

TIMELINE_FILE = "timeline.json"
"""its name in a run's directory"""
MAX_TIMELINE_BYTES = 256 * MIB
"""some millions of actions"""

RELEASING_KINDS = frozenset({BACKWARD, WEIGHT_GRAD})
"""kinds after which the saved activations of a forward are freed"""

PerStage = float | tuple[float, ...]
"""one number for all stages, or one for each"""


class ActionSpan(NamedTuple):
    """One action in time."""

    action: Action
    start: float
    end: float


Spans = Sequence[Iterable[tuple[Action | str, float, float]]]
"""for every rank (action or its text, start, end)"""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The start and end of every action. Columns, not objects: a million actions stay cheap."""

    name: str
    """the schedule's"""
    rank_of_stage: tuple[int, ...]
    """the rank of every stage"""
    rank_actions: RankActions
    """the actions of every rank, in order"""
    starts: tuple[tuple[float, ...], ...]
    """seconds since the first action, parallel to `rank_actions`"""
    ends: tuple[tuple[float, ...], ...]
    note: str = ""
    """a remark on the schedule"""
    measured: bool = False
    """whether a run recorded it"""

    @classmethod
    def from_spans(
        cls, name: str, rank_of_stage: Sequence[int], spans: Spans, *, note: str = "", zero: float | None = None
    ) -> Timeline:
        """The measured timeline of clock readings. `zero` is the reading that becomes 0; by default the earliest."""
        rows = [[_parse_span(rank, len(rank_of_stage), row) for row in rows] for rank, rows in enumerate(spans)]
        if zero is None:
            zero = min((span.start for row in rows for span in row), default=0.0)
        return cls(
            name=name,
            rank_of_stage=tuple(rank_of_stage),
            rank_actions=tuple(tuple(span.action for span in row) for row in rows),
            starts=tuple(tuple(span.start - zero for span in row) for row in rows),
            ends=tuple(tuple(span.end - zero for span in row) for row in rows),
            note=note,
            measured=True,
        )

    @property
    def ranks(self) -> int:
        return len(self.rank_actions)

    @cached_property
    def microbatches(self) -> int:
        return len({action.index for actions in self.rank_actions for action in actions if action.kind is FORWARD})

    @cached_property
    def slices(self) -> int:
        return 1 + max((action.slice_index for actions in self.rank_actions for action in actions), default=0)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The chunk of every stage: its index among the stages of its rank."""
        return tuple(self.rank_of_stage[:stage].count(home) for stage, home in enumerate(self.rank_of_stage))

    def spans(self, rank: int) -> Iterator[ActionSpan]:
        return map(ActionSpan, self.rank_actions[rank], self.starts[rank], self.ends[rank])

    @cached_property
    def duration(self) -> float:
        return max((max(ends) for ends in self.ends if ends), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds of forward and backward."""
        spans = zip(self.rank_actions[rank], self.starts[rank], self.ends[rank], strict=True)
        return sum(end - start for action, start, end in spans if action.kind in COMPUTE)

    @cached_property
    def bubble(self) -> float:
        if not self.duration:
            return 0.0
        return 1 - sum(map(self.busy, range(self.ranks))) / (self.ranks * self.duration)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For every rank, the most activations that it holds at once."""
        return tuple(round(self.peak_memory(rank)) for rank in range(self.ranks))

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """For every rank, the most weight versions at once: the latest and the stashed ones."""
        return tuple(1 + round(self.peak_memory(rank, activations=0.0, versions=1.0)) for rank in range(self.ranks))

    def memory_over_time(
        self, rank: int, activations: PerStage = 1.0, versions: PerStage = 0.0
    ) -> list[tuple[float, float]]:
        """The memory of a rank over time: (time, bytes from then on). The first entry is at 0.

        `activations` are the bytes that one F of a stage saves for backward; `versions` those of one stashed version of
        a stage's weights.
        """
        steps: dict[float, float] = {0.0: 0.0}
        for time, level in self._memory_changes(rank, activations, versions):
            steps[time] = level
        return list(steps.items())

    def peak_memory(self, rank: int, activations: PerStage = 1.0, versions: PerStage = 0.0) -> float:
        """The peak of `memory_over_time`."""
        return max(level for _, level in self._memory_changes(rank, activations, versions))

    def _memory_changes(self, rank: int, activations: PerStage, versions: PerStage) -> Iterator[tuple[float, float]]:
        """(time, bytes from then on); see [Note: figures of a timeline]."""
        sizes, stashed = per_stage(activations, len(self.rank_of_stage)), per_stage(versions, len(self.rank_of_stage))
        changes: list[tuple[float, float]] = []
        held: set[tuple[int, ...]] = set()
        level = 0.0
        columns = zip(self.rank_actions[rank], self.starts[rank], self.ends[rank], strict=True)
        for (stage, kind, index, part, _), start, end in columns:
            if kind is FORWARD:
                held.add((stage, index, part))
                changes.append((start, sizes[stage]))
            elif kind in RELEASING_KINDS:
                if (stage, index, part) in held:
                    held.remove((stage, index, part))
                else:
                    level += sizes[stage]  # from an earlier window
                changes.append((end, -sizes[stage]))
            elif kind is ActionKind.STASH:
                held.add((stage, index))
                changes.append((start, stashed[stage]))
            elif kind is ActionKind.DROP_STASHED:
                level += 0.0 if (stage, index) in held else stashed[stage]
                changes.append((end, -stashed[stage]))
        yield 0.0, level
        for time, change in changes:
            level += change
            yield time, level

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "measured": self.measured,
            "note": self.note,
            "homes": list(self.rank_of_stage),
            "ranks": [[[str(a), start, end] for a, start, end in self.spans(rank)] for rank in range(self.ranks)],
        }

    @classmethod
    def from_json(cls, value: Any) -> Timeline:
        try:
            homes, note = [int(rank) for rank in value["homes"]], str(value.get("note", ""))
            timeline = cls.from_spans(str(value["name"]), homes, value["ranks"], note=note, zero=0.0)
            timeline = replace(timeline, measured=bool(value.get("measured", False)))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a timeline ({type(error).__name__}: {error}); write it with to_json") from error
        if not homes:
            raise ValueError("a timeline has no stages (homes is empty); give the rank of every stage")
        if wrong := [rank for rank in homes if not 0 <= rank < timeline.ranks]:
            where = f"homes: {wrong[0]}, {timeline.ranks} ranks"
            raise ValueError(f"a stage is on a rank that is not there ({where}); give its list")
        return timeline


def per_stage(value: PerStage, stages: int) -> tuple[float, ...]:
    """A number for every stage."""
    if isinstance(value, tuple):
        if len(value) != stages:
            raise ValueError(f"{len(value)} numbers for {stages} stages ({value}); give one, or one for each stage")
        return value
    return (float(value),) * stages


def write_timelines(folder: Path, planned: Timeline | None, measured: Timeline | None) -> None:
    """Write both to a run's directory."""
    both = {"planned": planned, "measured": measured}
    text = json.dumps({key: timeline.to_json() for key, timeline in both.items() if timeline is not None})
    (folder / TIMELINE_FILE).write_text(text + "\n", encoding="utf-8")


def read_timelines(folder: Path) -> tuple[Timeline | None, Timeline | None]:
    """(planned, measured) timelines of a run's directory; None where one is missing."""
    path = folder / TIMELINE_FILE
    try:
        stored = read_json(path, max_bytes=MAX_TIMELINE_BYTES)
    except InputFileError as error:
        if not path.exists():
            raise ValueError(f"no timeline in the run ({folder}); only runs with pp > 1 record one") from None
        raise ValueError(f"the run's timeline {error}; record it again") from error
    if not isinstance(stored, dict):
        raise ValueError(f"the run's timeline is not an object ({path}); record it again")
    planned, measured = (stored.get(key) for key in ("planned", "measured"))
    if planned is None and measured is None:
        raise ValueError(f"the run's timeline is empty ({path}); expected the keys planned or measured")
    try:
        return (
            None if planned is None else Timeline.from_json(planned),
            None if measured is None else Timeline.from_json(measured),
        )
    except ValueError as error:
        raise ValueError(f"the run's timeline cannot be read ({path}: {error}); record it again") from error


def _parse_span(rank: int, stages: int, row: tuple[Action | str, float, float]) -> ActionSpan:
    try:
        what, start, end = row[0], float(row[1]), float(row[2])
        if not math.isfinite(start + end):
            raise ValueError("no time")
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not an action with its start and end (rank {rank}: {row}); give all three") from error
    action = what if isinstance(what, Action) else Action.parse(what)
    if end < start:
        raise ValueError(f"an action ends before it starts (rank {rank}, {what}: {start:g} to {end:g}); use one clock")
    if action.stage >= stages:
        raise ValueError(
            f"an action of a stage without a rank (rank {rank}, {what}, {stages} stages); add its rank to homes"
        )
    return ActionSpan(action, start, end)
