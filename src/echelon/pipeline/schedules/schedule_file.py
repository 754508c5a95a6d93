"""Schedules from files: `schedule=file:PATH`.

The format is the text of a `Schedule`, a line per rank; `#` starts a comment, and empty lines are ignored:

    # 1F1B, 2 ranks, 2 microbatches
    rank 0, stages 0: 0F0 0F1 0B0 0B1 0U1
    rank 1, stages 1: 1F0 1B0 1F1 1B1 1U1

The file fixes ranks, stages, microbatches and slices. Sends and receives may be left out; `lower` adds them. Every
schedule can be drawn; only synchronous steps without slices can be run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from echelon.input_file import InputFileError, read_text
from echelon.pipeline.actions import LATEST, Action, ActionKind
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.validate import find_faults

_LINE_PATTERN = re.compile(r"rank\s+(\d{1,9})\s*,\s*stages?\s+(\d{1,9}(?:[\s,]+\d{1,9})*)\s*:(.*)")

MAX_LISTED = 5
"""of many errors of one kind"""


def load_schedule(
    path: str | Path, *, ranks: int = 0, chunks: int = 0, microbatches: int = 0, slices: int = 0
) -> Schedule:
    """Read and validate a schedule. Sizes other than 0 must be those of the file."""
    try:
        text = read_text(path)
    except InputFileError as error:
        raise ValueError(f"the schedule {error}; give a text file") from error
    schedule = parse_schedule(text, name=f"file:{path}")
    asked = {"ranks": ranks, "stages": ranks * chunks, "microbatches": microbatches, "slices": slices}
    faults = [
        f"it has {has} {noun}, but {want} are asked for"
        for noun, want in asked.items()
        if want and want != (has := getattr(schedule, noun))
    ]
    _raise_errors(schedule.name, faults, "ask for what the file has, or choose another schedule")
    return schedule


def parse_schedule(text: str, name: str = "file") -> Schedule:
    """The schedule of a text; raises ValueError with all its errors, each with its line."""
    parser = _ScheduleParser()
    for number, line in enumerate(text.splitlines(), 1):
        if content := line.partition("#")[0].strip():
            parser.parse_line(number, content)
    errors = parser.errors or parser.placement_errors()
    _raise_errors(name, errors, "write a line per rank, as in rank 0, stages 0: 0F0 0B0 0U1")
    schedule = parser.schedule(name)
    faults = find_faults(schedule)
    lines = [f"line {parser.line_of_rank[fault.rank]}: " if fault.rank >= 0 else "" for fault in faults]
    _raise_errors(name, [f"{line}{fault}" for line, fault in zip(lines, faults, strict=True)], "change its lists")
    return schedule


def check_runnable(schedule: Schedule) -> None:
    """Reject schedules that can be drawn but not run."""
    every = [action for actions in schedule.rank_actions for action in actions]
    updates = Counter(action.stage for action in every if action.kind is ActionKind.UPDATE)
    faults = []
    if any(action.kind in (ActionKind.STASH, ActionKind.DROP_STASHED) or action.version != LATEST for action in every):
        faults.append("it has weight versions (K, D, @)")
    if several := [stage for stage, count in updates.items() if count > 1]:
        faults.append(f"it updates more than once (stage {several[0]})")
    if schedule.slices > 1:
        faults.append(f"it cuts microbatches into slices ({schedule.slices})")
    remedy = "a file is run where its step is synchronous; draw it, or choose pipedream, 2bw or terapipe"
    _raise_errors(schedule.name, faults, remedy)


def _raise_errors(name: str, errors: list[str], remedy: str) -> None:
    if errors:
        head = f"the schedule cannot be used ({name}, {len(errors)} faults); {remedy}:"
        raise ValueError("\n  ".join([head, *errors]))


class _ScheduleParser:
    """The lines parsed so far."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.line_of_rank: dict[int, int] = {}
        self.rank_of_stage: list[tuple[int, int]] = []
        """(stage, rank), in the order of the file"""
        self.actions_of_rank: dict[int, list[Action]] = {}

    def parse_line(self, number: int, content: str) -> None:
        match = _LINE_PATTERN.fullmatch(content)
        if match is None:
            self.errors.append(f"line {number}: is not rank, stages and actions ({content[:40]!r})")
            return
        rank = int(match[1])
        if rank in self.line_of_rank:
            self.errors.append(f"line {number}: rank {rank} is on line {self.line_of_rank[rank]} already")
            return
        self.line_of_rank[rank] = number
        self.rank_of_stage += [(int(stage), rank) for stage in re.split(r"[\s,]+", match[2])]
        self.actions_of_rank[rank] = []
        for word in match[3].split():
            try:
                self.actions_of_rank[rank].append(Action.parse(word))
            except ValueError as error:
                self.errors.append(f"line {number}: {error}")

    def placement_errors(self) -> list[str]:
        """Ranks and stages that are missing or duplicated."""
        stages = Counter(stage for stage, _ in self.rank_of_stage)
        faults = [f"rank {rank} has no line" for rank in _missing(self.line_of_rank)]
        faults += [f"stage {stage} is on no rank" for stage in _missing(stages)]
        return faults + [f"stage {stage} is there {count} times" for stage, count in stages.items() if count > 1]

    def schedule(self, name: str) -> Schedule:
        every = [action for actions in self.actions_of_rank.values() for action in actions]
        return Schedule(
            name=name,
            rank_of_stage=tuple(rank for _, rank in sorted(self.rank_of_stage)),
            microbatches=1 + max((action.index for action in every if action.kind is ActionKind.FORWARD), default=0),
            rank_actions=tuple(tuple(actions) for _, actions in sorted(self.actions_of_rank.items())),
            slices=1 + max((action.slice_index for action in every), default=0),
        )


def _missing(numbers: Collection[int]) -> Iterator[int]:
    """The first few missing numbers: a file may name a stage of any number."""
    return islice((number for number in range(max(numbers, default=0) + 1) if number not in numbers), MAX_LISTED)
