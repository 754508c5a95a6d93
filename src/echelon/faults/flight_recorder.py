"""Flight recorder: a ring buffer of the collectives and p2p transfers that a rank started, waited for and finished.

[Note: a buffer that outlives the process]

A killed rank cannot report what it was doing, and a hanging one does not answer. So the recorder is a buffer of fixed
size, mapped from a file where the launcher provides a directory: it survives any exit, and another process can read it
while this one hangs.

    slot: flag | order | start | wait start | end | op, axis, sequence, number, peers, shape, dtype, step, phase, site
    end:  step | phase start | phase

Numbers count the operations of a sequence: a process group, or one p2p channel between two ranks. Ranks that run the
same operations in the same order assign the same numbers. Any thread may write, because each slot has one writer.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from echelon.faults.recorder_entry import (
    BUFFER_BYTES,
    EMPTY,
    ENDED,
    FAILED,
    NUM_SLOTS,
    PHASE_RECORD,
    SLOT_BYTES,
    SLOT_HEADER,
    STARTED,
    TIMESTAMP,
    WAITING,
    RecorderEntry,
    format_ranks,
    read_entries,
)

_TEXT_BYTES = SLOT_BYTES - SLOT_HEADER.size
_HIDDEN_FILES = {__file__, contextlib.__file__}
_SHORT_PATHS: dict[str, str] = {}
MIN_WAIT_S = 0.5
"""seconds below which `longest_wait` ignores a wait"""
NON_TRAINING_PHASES = ("evaluation", "save")
"""phases whose forward passes and data loading are not part of a training step"""


def hide_call_sites_in(file: str) -> None:
    """Record the callers of this file's functions as call sites, not the file itself."""
    _HIDDEN_FILES.add(file)


def shorten_path(file: str) -> str:
    """Shorten a path: from the package `echelon` on, or its last two parts."""
    short = _SHORT_PATHS.get(file)
    if short is None:
        parts = Path(file).parts
        start = len(parts) - 1 - parts[::-1].index("echelon") if "echelon" in parts[:-1] else len(parts) - 2
        short = _SHORT_PATHS[file] = "/".join(parts[max(start, 0) :])
    return short


class OperationSequence:
    """The numbered operations of one process group or p2p channel."""

    def __init__(self, name: str, ranks: Sequence[int]):
        self.name, self.ranks = name, tuple(ranks)
        self.peers = format_ranks(self.ranks)
        self.last_number = 0
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        self.last_number = next(self._numbers)
        return self.last_number


class Waitable(Protocol):
    """A handle with torch's `Work.wait`."""

    def wait(self) -> Any: ...


class FlightRecorder:
    """The last operations of one rank, its step and phase, and the seconds that it waited."""

    def __init__(self) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(BUFFER_BYTES)
        self._order = itertools.count()
        self.step = 0
        """the current step, counted from 1; 0 before the first"""
        self.phase = "start"
        self.phase_start = time.time()
        self.mesh_position = ""
        """e.g. `dp 1, tp 0`"""
        self.wait_s = 0.0
        """seconds that this rank waited for other ranks"""
        self.data_wait_s = 0.0
        """seconds that it waited for data"""
        self.sequences: dict[str, OperationSequence] = {}
        self.on_phase: Callable[[int, str], None] | None = None
        """hook of the fault injector: (step, phase)"""
        self.should_skip: Callable[[int, str, str], bool] | None = None
        """hook of the fault injector, true to skip an operation: (step, op, axis)"""
        self.on_send: Callable[[str, str, Any], None] | None = None
        """hook that sees every tensor this rank sends: (op, axis, tensor)"""
        self.on_receive: Callable[[str, str, Any], None] | None = None
        """hook that sees every tensor this rank receives: (op, axis, tensor)"""
        self.device_waits: deque[tuple[int, Any, Any]] = deque(maxlen=4096)
        """(slot, event before, event after) of waits of a CUDA stream; the host does not wait"""

    def map_to_file(self, path: Path) -> None:
        """Record into a file from now on, which outlives this process."""
        with open(path, "w+b") as file:
            file.truncate(BUFFER_BYTES)
            self._buffer = mmap.mmap(file.fileno(), BUFFER_BYTES)

    def new_sequence(self, ranks: Sequence[int], channel: str = "") -> OperationSequence:
        """Name a process group or channel. Ranks that create them in the same order give them the same names."""
        base = format_ranks(ranks) + channel
        names = (base if number == 1 else f"{base}#{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self.sequences)
        self.sequences[name] = OperationSequence(name, ranks)
        return self.sequences[name]

    def record_start(
        self,
        op: str,
        axis: str,
        sequence: OperationSequence,
        shape: Sequence[int] = (),
        dtype: object = "",
        peers: str = "",
    ) -> int:
        """Record that an operation starts; returns its slot."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _HIDDEN_FILES and frame.f_back is not None:
            frame = frame.f_back
        order = next(self._order)
        start = order % NUM_SLOTS * SLOT_BYTES
        site = f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        # A long list of peers is left out: the sequence's name contains the group.
        peers = peers or sequence.peers
        call = f"{op}\t{axis}\t{sequence.name}\t{sequence.next_number()}\t{peers if len(peers) < 64 else ''}"
        tensor = f"{list(shape)}\t{str(dtype).removeprefix('torch.')}"
        text = f"{call}\t{tensor}\t{self.step}\t{self.phase}\t{site}".encode("utf-8", "replace")[:_TEXT_BYTES]
        buffer, body = self._buffer, start + SLOT_HEADER.size
        SLOT_HEADER.pack_into(buffer, start, EMPTY, order, time.time(), 0.0, 0.0, len(text))
        buffer[body : body + len(text)] = text
        buffer[start : start + 1] = STARTED
        return order

    def _mark(self, slot: int, flag: bytes, field: int, now: float) -> None:
        start = slot % NUM_SLOTS * SLOT_BYTES
        if SLOT_HEADER.unpack_from(self._buffer, start)[1] != slot:
            return  # a later operation has taken the slot
        TIMESTAMP.pack_into(self._buffer, start + 1 + 8 + 8 * field, now)
        self._buffer[start : start + 1] = flag

    def record_wait(self, slot: int) -> float:
        now = time.time()
        self._mark(slot, WAITING, 1, now)
        return now

    def record_end(self, slot: int, since: float) -> None:
        now = time.time()
        self._mark(slot, ENDED, 2, now)
        self.wait_s += now - since

    @contextmanager
    def waiting(self, slot: int, *, on_device: bool = False) -> Iterator[None]:
        """Record that the block waits for an operation.

        On a device the CUDA stream waits, not the host; events before and after measure for how long.
        """
        before = _record_cuda_event() if on_device else None
        since = self.record_wait(slot)
        try:
            yield
        except BaseException:
            self._mark(slot, FAILED, 2, time.time())
            raise
        if before is None:
            self.record_end(slot, since)
        else:
            self.device_waits.append((slot, before, _record_cuda_event()))

    @contextmanager
    def blocking_operation(self, op: str, axis: str, sequence: OperationSequence) -> Iterator[None]:
        """Record the blocking operation inside the block."""
        with self.waiting(self.record_start(op, axis, sequence)):
            yield

    def _set_phase(self, phase: str) -> None:
        self.phase, self.phase_start = phase, time.time()
        PHASE_RECORD.pack_into(self._buffer, NUM_SLOTS * SLOT_BYTES, self.step, self.phase_start, phase.encode()[:16])

    def enter_phase(self, phase: str) -> None:
        """Begin another phase of the same step."""
        if self.phase in NON_TRAINING_PHASES and phase in ("forward", "data"):
            return
        self._set_phase(phase)
        if self.on_phase is not None:
            self.on_phase(self.step, phase)

    @contextmanager
    def phase_scope(self, phase: str) -> Iterator[None]:
        """Run the block in a phase, and return to the previous phase after it."""
        previous, wait_s, data_wait_s = self.phase, self.wait_s, self.data_wait_s
        self.enter_phase(phase)
        try:
            yield
        finally:
            self._set_phase(previous)
            if phase in NON_TRAINING_PHASES:  # not part of a training step
                self.wait_s, self.data_wait_s = wait_s, data_wait_s

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Count the seconds of the block as waiting for data."""
        start, wait_s = time.time(), self.wait_s
        with self.phase_scope("data"):
            yield
        self.data_wait_s += time.time() - start - (self.wait_s - wait_s)

    def longest_wait(self) -> float:
        """Seconds that a thread of this rank has waited in one operation, without decoding the entries.

        torch's timeout of a collective runs from its start, that of a p2p transfer from the call of `wait`.
        """
        now, longest = time.time(), 0.0
        for start in range(0, NUM_SLOTS * SLOT_BYTES, SLOT_BYTES):
            if self._buffer[start : start + 1] == WAITING:
                _, _, started, waiting, _, length = SLOT_HEADER.unpack_from(self._buffer, start)
                text = start + SLOT_HEADER.size
                is_p2p = self._buffer[text : text + 5] in (b"send\t", b"recei")
                if now - waiting > MIN_WAIT_S and length:
                    longest = max(longest, now - (waiting if is_p2p else started))
        return longest

    def entries(self) -> list[RecorderEntry]:
        return read_entries(self._buffer[:])

    def poll_device_waits(self) -> None:
        """Record the end of waits that their CUDA stream has passed."""
        while self.device_waits:
            slot, before, after = self.device_waits[0]
            if not after.query():
                return
            with contextlib.suppress(IndexError):
                self.device_waits.popleft()
            self._mark(slot, ENDED, 2, time.time())
            self.wait_s += before.elapsed_time(after) / 1e3


class RecordedWork:
    """The handle of an operation, which records that it is waited for."""

    def __init__(
        self,
        recorder: FlightRecorder,
        slot: int,
        work: Waitable,
        on_device: bool = False,
        received: tuple[str, str, Any] | None = None,
    ):
        """`received` is (op, axis, tensor): what `on_receive` sees when the operation is complete."""
        self._recorder, self._slot, self._work, self._on_device = recorder, slot, work, on_device
        self._received = received

    def wait(self) -> None:
        with self._recorder.waiting(self._slot, on_device=self._on_device):
            self._work.wait()
        if self._received is not None and self._recorder.on_receive is not None:
            self._recorder.on_receive(*self._received)


def _record_cuda_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
