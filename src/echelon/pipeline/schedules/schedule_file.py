"""A schedule that the user wrote: `schedule=file:PATH`.

The format is the text of a `Schedule`, a line per rank; `#` starts a comment and empty lines do not count:

    # 1F1B, 2 ranks, 2 microbatches
    rank 0, stages 0: 0F0 0F1 0B0 0B1 0U1
    rank 1, stages 1: 1F0 1B0 1F1 1B1 1U1

The file fixes ranks, stages, microbatches and slices. Sends and receives may be left out; `lower` adds them. Every
schedule can be drawn; what is run is one synchronous step of whole microbatches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from itertools import islice
from pathlib import Path

from echelon.pipeline.actions import NEWEST, Action, Kind
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.validate import find

_LINE = re.compile(r"rank\s+(\d{1,9})\s*,\s*stages?\s+(\d{1,9}(?:[\s,]+\d{1,9})*)\s*:(.*)")

FEW = 5
"""of many faults of one kind, those that are told"""


def build(path: str | Path, *, ranks: int = 0, chunks: int = 0, microbatches: int = 0, slices: int = 0) -> Schedule:
    """Reads a schedule and checks it. What is asked for beside the path must be what the file has; 0 asks nothing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the schedule cannot be read ({path}: {error}); give a text file") from error
    schedule = parse(text, name=f"file:{path}")
    asked = {"ranks": ranks, "stages": ranks * chunks, "microbatches": microbatches, "slices": slices}
    faults = [
        f"it has {has} {noun}, but {want} are asked for"
        for noun, want in asked.items()
        if want and want != (has := getattr(schedule, noun))
    ]
    if faults:
        _refuse(schedule.name, faults, "ask for what the file has, or choose another schedule")
    return schedule


def parse(text: str, name: str = "file") -> Schedule:
    """The schedule that a text says, or all its faults at once, each with its line."""
    reading = _Reading()
    for number, line in enumerate(text.splitlines(), 1):
        if content := line.partition("#")[0].strip():
            reading.take(number, content)
    faults = reading.faults or reading.gaps()
    if faults:
        _refuse(name, faults, "write a line per rank, as in rank 0, stages 0: 0F0 0B0 0U1")
    schedule = reading.schedule(name)
    wrong = [f"line {reading.line[fault.rank]}: {fault}" if fault.rank >= 0 else str(fault) for fault in find(schedule)]
    if wrong:
        _refuse(name, wrong, "change its lists")
    return schedule


def check_runs(schedule: Schedule) -> None:
    """Refuses what can be drawn and not run."""
    every = [action for actions in schedule.lists for action in actions]
    updates = Counter(action.stage for action in every if action.kind is Kind.UPDATE)
    faults = []
    if any(action.kind in (Kind.KEEP, Kind.DROP) or action.version != NEWEST for action in every):
        faults.append("it says which versions of the weights are used (K, D, @)")
    if several := [stage for stage, count in updates.items() if count > 1]:
        faults.append(f"it updates more than once (stage {several[0]})")
    if schedule.slices > 1:
        faults.append(f"it cuts microbatches into slices ({schedule.slices})")
    if faults:
        remedy = "a file is run where its step is synchronous; draw it, or choose pipedream, 2bw or terapipe"
        _refuse(schedule.name, faults, remedy)


def _refuse(name: str, faults: list[str], remedy: str) -> None:
    raise ValueError("\n  ".join([f"the schedule cannot be used ({name}, {len(faults)} faults); {remedy}:", *faults]))


class _Reading:
    """What the lines say so far."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.line: dict[int, int] = {}
        """where each rank is written"""
        self.stages: dict[int, list[int]] = {}
        self.lists: dict[int, list[Action]] = {}

    def take(self, number: int, content: str) -> None:
        match = _LINE.fullmatch(content)
        if match is None:
            self.faults.append(f"line {number}: is not rank, stages and actions ({content[:40]!r})")
            return
        rank = int(match[1])
        if rank in self.line:
            self.faults.append(f"line {number}: rank {rank} is on line {self.line[rank]} already")
            return
        self.line[rank] = number
        self.stages[rank] = [int(stage) for stage in re.split(r"[\s,]+", match[2])]
        self.lists[rank] = []
        for word in match[3].split():
            try:
                self.lists[rank].append(Action.parse(word))
            except ValueError as error:
                self.faults.append(f"line {number}: {error}")

    def gaps(self) -> list[str]:
        """Ranks and stages that are missing, or there twice."""
        stages = Counter(stage for held in self.stages.values() for stage in held)
        faults = [f"rank {rank} has no line" for rank in _missing(max(self.line, default=0), self.line)]
        faults += [f"stage {stage} is on no rank" for stage in _missing(max(stages, default=0), stages)]
        return faults + [f"stage {stage} is there {count} times" for stage, count in stages.items() if count > 1]

    def schedule(self, name: str) -> Schedule:
        homes = {stage: rank for rank, held in self.stages.items() for stage in held}
        every = [action for actions in self.lists.values() for action in actions]
        return Schedule(
            name=name,
            homes=tuple(homes[stage] for stage in range(len(homes))),
            microbatches=1 + max((action.index for action in every if action.kind is Kind.FORWARD), default=0),
            lists=tuple(tuple(self.lists[rank]) for rank in range(len(self.lists))),
            slices=1 + max((action.part for action in every), default=0),
        )


def _missing(largest: int, there: Container[int]) -> Iterator[int]:
    """The first few numbers that are not there: a file may name a stage of any number."""
    return islice((number for number in range(largest + 1) if number not in there), FEW)
