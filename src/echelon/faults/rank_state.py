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

from echelon.faults.flight_recorder import FlightRecorder, shorten_path
from echelon.faults.host_memory import HostMemory, read_host_memory
from echelon.faults.recorder_entry import RecorderEntry, format_ranks, parse_ranks

MAX_FRAMES = 12
"""innermost calls of a stack that are told"""
HIDDEN_FILES = ("/faults/injector.py", "/faults/flight_recorder.py", "/contextlib.py")
HEARTBEAT_ENTRIES = 24
"""operations that a heartbeat carries where no file holds the ring"""


@dataclass(frozen=True, kw_only=True)
class RankState:
    rank: int
    mesh_position: str = ""
    host: str = ""
    pid: int = 0
    heartbeat_time: float = 0.0
    step: int = 0
    phase: str = "start"
    phase_start: float = 0.0
    """when the phase began"""
    stack: tuple[str, ...] = ()
    """`file:line in function`, innermost first, of the main thread"""
    sequences: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """the number of the last operation of every lane, and its ranks"""
    entries: tuple[RecorderEntry, ...] = ()
    memory: HostMemory = field(default_factory=HostMemory)
    exit_reason: str = ""
    """how it ended: the exception's line, or what the launcher saw"""
    exit_kind: str = ""
    """`raised` an exception, or was `killed`: its process ended without one"""
    lost_peer: bool = False
    """it ended because of another rank"""
    exit_time: float = 0.0

    @property
    def pending_entry(self) -> RecorderEntry | None:
        """What it waits for: of several threads, the one that has waited longest."""
        open_ones = [entry for entry in self.entries if entry.is_pending]
        return min(open_ones, key=lambda entry: entry.wait_start, default=None)

    @property
    def last_entry(self) -> RecorderEntry | None:
        """The last operation that it started."""
        return self.entries[-1] if self.entries else None

    def last_number(self, sequence: str) -> int | None:
        """How many operations of a lane it has started; none if it does not know the lane."""
        seen = [entry.number for entry in self.entries if entry.sequence == sequence]
        if sequence in self.sequences:
            seen.append(self.sequences[sequence][0])
        return max(seen, default=None)

    def with_exit_time(self, when: float) -> RankState:
        """The same, ended at another time: of several endings the earliest counts."""
        return replace(self, exit_time=when)

    def to_json(self, entries: bool = True) -> str:
        found: dict[str, Any] = {**self.__dict__, "memory": asdict(self.memory)}
        found["sequences"] = {name: [last, format_ranks(ranks)] for name, (last, ranks) in self.sequences.items()}
        found["entries"] = (
            [list(entry.__dict__.values()) for entry in self.entries[-HEARTBEAT_ENTRIES:]] if entries else []
        )
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> RankState:
        found = json.loads(text)
        found["sequences"] = {name: (last, parse_ranks(ranks)) for name, (last, ranks) in found["sequences"].items()}
        rows: list[list[Any]] = [[tuple(v) if isinstance(v, list) else v for v in row] for row in found["entries"]]
        found["entries"] = tuple(RecorderEntry(*row) for row in rows)
        found["memory"] = HostMemory(**found["memory"])
        found["stack"] = tuple(found["stack"])
        return cls(**found)

    def with_exit(self, how: str, ending: str, *, lost_peer: bool = False) -> RankState:
        """The same rank, once it ended."""
        return replace(
            self, exit_kind=how, exit_reason=ending, lost_peer=lost_peer, exit_time=self.exit_time or time.time()
        )


def capture_rank_state(recorder: FlightRecorder, rank: int) -> RankState:
    """This rank, now. Any thread may ask."""
    return RankState(
        rank=rank,
        mesh_position=recorder.mesh_position,
        host=socket.gethostname(),
        pid=os.getpid(),
        heartbeat_time=time.time(),
        step=recorder.step,
        phase=recorder.phase,
        phase_start=recorder.phase_start,
        stack=main_thread_stack(),
        sequences={name: (lane.last_number, lane.ranks) for name, lane in list(recorder.sequences.items())},
        entries=tuple(recorder.entries()),
        memory=read_host_memory(),
    )


def main_thread_stack() -> tuple[str, ...]:
    """Where the main thread is."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[str] = []
    # What a fault on purpose runs through is not where the rank is.
    while frame is not None and frame.f_code.co_filename.endswith(HIDDEN_FILES):
        frame = frame.f_back
    while frame is not None and len(calls) < MAX_FRAMES:
        calls.append(f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(calls)
