"""A snapshot of one rank, as JSON: published at every heartbeat, read when a rank fails."""

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
"""innermost calls of a stack that a snapshot contains"""
HIDDEN_FILES = ("/faults/injector.py", "/faults/flight_recorder.py", "/contextlib.py")
HEARTBEAT_ENTRIES = 24
"""operations that a heartbeat contains where no file holds the recorder"""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank was doing at its last heartbeat, and how it ended."""

    rank: int
    mesh_position: str = ""
    host: str = ""
    pid: int = 0
    heartbeat_time: float = 0.0
    step: int = 0
    phase: str = "start"
    phase_start: float = 0.0
    stack: tuple[str, ...] = ()
    """`file:line in function`, innermost first, of the main thread"""
    sequences: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """the number of the last operation of every sequence, and its ranks"""
    entries: tuple[RecorderEntry, ...] = ()
    memory: HostMemory = field(default_factory=HostMemory)
    exit_reason: str = ""
    """the exception's line, or how the process ended"""
    exit_kind: str = ""
    """`raised` an exception, or `killed`: the process ended without one"""
    lost_peer: bool = False
    """whether it ended because of another rank"""
    exit_time: float = 0.0

    @property
    def pending_entry(self) -> RecorderEntry | None:
        """The operation that it has waited for longest, in any thread."""
        pending = [entry for entry in self.entries if entry.is_pending]
        return min(pending, key=lambda entry: entry.wait_start, default=None)

    def last_number(self, sequence: str) -> int | None:
        """The number of the last operation that it started on a sequence; None if it does not know the sequence."""
        numbers = [entry.number for entry in self.entries if entry.sequence == sequence]
        if sequence in self.sequences:
            numbers.append(self.sequences[sequence][0])
        return max(numbers, default=None)

    def to_json(self, entries: bool = True) -> str:
        fields: dict[str, Any] = {**self.__dict__, "memory": asdict(self.memory)}
        fields["sequences"] = {name: [last, format_ranks(ranks)] for name, (last, ranks) in self.sequences.items()}
        newest = self.entries[-HEARTBEAT_ENTRIES:] if entries else ()
        fields["entries"] = [list(entry.__dict__.values()) for entry in newest]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> RankState:
        fields = json.loads(text)
        fields["sequences"] = {name: (last, parse_ranks(ranks)) for name, (last, ranks) in fields["sequences"].items()}
        rows: list[list[Any]] = [[tuple(v) if isinstance(v, list) else v for v in row] for row in fields["entries"]]
        fields["entries"] = tuple(RecorderEntry(*row) for row in rows)
        fields["memory"] = HostMemory(**fields["memory"])
        fields["stack"] = tuple(fields["stack"])
        return cls(**fields)

    def with_exit(self, kind: str, reason: str, *, lost_peer: bool = False, exit_time: float = 0.0) -> RankState:
        """The state after the rank ended, now by default."""
        ended = exit_time or self.exit_time or time.time()
        return replace(self, exit_kind=kind, exit_reason=reason, lost_peer=lost_peer, exit_time=ended)


def capture_rank_state(recorder: FlightRecorder, rank: int) -> RankState:
    """Capture this rank's state now, from any thread."""
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
        sequences={name: (seq.last_number, seq.ranks) for name, seq in list(recorder.sequences.items())},
        entries=tuple(recorder.entries()),
        memory=read_host_memory(),
    )


def main_thread_stack() -> tuple[str, ...]:
    """The main thread's Python stack, innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[str] = []
    # The frames of an injected fault do not show where the rank is.
    while frame is not None and frame.f_code.co_filename.endswith(HIDDEN_FILES):
        frame = frame.f_back
    while frame is not None and len(calls) < MAX_FRAMES:
        calls.append(f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(calls)
