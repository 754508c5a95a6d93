"""What one rank says of itself, as text that travels: written at every heartbeat, read when something is wrong."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

from echelon.faults.flight_recorder import Recorder, short
from echelon.faults.host_memory import Memory, memory
from echelon.faults.recorder_entry import Entry, read_ranks, spelled

FRAMES = 12
"""innermost calls of a stack that are told"""
OWN = ("/faults/injector.py", "/faults/flight_recorder.py", "/contextlib.py")
RECENT = 24
"""operations that a heartbeat carries where no file holds the ring"""


@dataclass(frozen=True, kw_only=True)
class State:
    rank: int
    position: str = ""
    host: str = ""
    pid: int = 0
    when: float = 0.0
    step: int = 0
    phase: str = "start"
    since: float = 0.0
    """when the phase began"""
    stack: tuple[str, ...] = ()
    """`file:line in function`, innermost first, of the main thread"""
    lanes: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """the number of the last operation of every lane, and its ranks"""
    entries: tuple[Entry, ...] = ()
    memory: Memory = field(default_factory=Memory)
    ending: str = ""
    """how it ended: the exception's line, or what the launcher saw"""
    how: str = ""
    """`raised` an exception, or was `killed`: its process ended without one"""
    lost_peer: bool = False
    """it ended because of another rank"""
    ended: float = 0.0

    @property
    def waiting(self) -> Entry | None:
        """What it waits for: of several threads, the one that has waited longest."""
        open_ones = [entry for entry in self.entries if entry.is_open]
        return min(open_ones, key=lambda entry: entry.waiting, default=None)

    @property
    def last(self) -> Entry | None:
        """The last operation that it started."""
        return self.entries[-1] if self.entries else None

    def number(self, lane: str) -> int | None:
        """How many operations of a lane it has started; none if it does not know the lane."""
        seen = [entry.number for entry in self.entries if entry.lane == lane]
        if lane in self.lanes:
            seen.append(self.lanes[lane][0])
        return max(seen, default=None)

    def at(self, when: float) -> State:
        """The same, ended at another time: of several endings the earliest counts."""
        return replace(self, ended=when)

    def to_json(self, entries: bool = True) -> str:
        found: dict[str, Any] = {**self.__dict__, "memory": asdict(self.memory)}
        found["lanes"] = {name: [last, spelled(ranks)] for name, (last, ranks) in self.lanes.items()}
        found["entries"] = [list(entry.__dict__.values()) for entry in self.entries[-RECENT:]] if entries else []
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> State:
        found = json.loads(text)
        found["lanes"] = {name: (last, read_ranks(ranks)) for name, (last, ranks) in found["lanes"].items()}
        rows: list[list[Any]] = [[tuple(v) if isinstance(v, list) else v for v in row] for row in found["entries"]]
        found["entries"] = tuple(Entry(*row) for row in rows)
        found["memory"] = Memory(**found["memory"])
        found["stack"] = tuple(found["stack"])
        return cls(**found)

    def after(self, how: str, ending: str, *, lost_peer: bool = False) -> State:
        """The same rank, once it ended."""
        return replace(self, how=how, ending=ending, lost_peer=lost_peer, ended=self.ended or time.time())


def look(recorder: Recorder, rank: int) -> State:
    """This rank, now. Any thread may ask."""
    return State(
        rank=rank,
        position=recorder.position,
        host=socket.gethostname(),
        pid=os.getpid(),
        when=time.time(),
        step=recorder.step,
        phase=recorder.phase,
        since=recorder.since,
        stack=main_stack(),
        lanes={name: (lane.last, lane.ranks) for name, lane in list(recorder.lanes.items())},
        entries=tuple(recorder.entries()),
        memory=memory(),
    )


def main_stack() -> tuple[str, ...]:
    """Where the main thread is."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[str] = []
    # What a fault on purpose runs through is not where the rank is.
    while frame is not None and frame.f_code.co_filename.endswith(OWN):
        frame = frame.f_back
    while frame is not None and len(calls) < FRAMES:
        calls.append(f"{short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(calls)
