"""What this rank did last: every collective and every message that it started, waited for and ended.

[Note: a black box]

A rank that is killed cannot tell what it was doing, and one that hangs cannot be asked. So the ring is bytes of fixed
size, mapped from a file where the launcher gave a folder: what was written is there after any ending, and another
process reads it while this one is stuck.

    slot: flag | order | started | waiting since | ended | op, axis, lane, number, peers, shape, type, step, phase, site
    end:  step | since | phase

Numbers count the operations of a lane, which is a process group, or one channel of messages between two ranks. Ranks
that do the same things in the same order have the same numbers. Any thread may write: a slot belongs to who drew it.
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
    encode_entry,
    format_ranks,
    read_entries,
)

_TEXT_BYTES = SLOT_BYTES - SLOT_HEADER.size
_HIDDEN_FILES = {__file__, contextlib.__file__}
_SHORT_PATHS: dict[str, str] = {}
MIN_WAIT_S = 0.5
"""seconds before a wait is worth a thought"""
NON_TRAINING_PHASES = ("evaluation", "save")
"""phases inside of which forward is not training's"""


def hide_call_sites_in(file: str) -> None:
    """Lines of this file are not whose fault an operation is: its callers are told instead."""
    _HIDDEN_FILES.add(file)


def shorten_path(file: str) -> str:
    """A file's name as people look for it: from our package on, or its last two parts."""
    found = _SHORT_PATHS.get(file)
    if found is None:
        parts = Path(file).parts
        start = len(parts) - 1 - parts[::-1].index("echelon") if "echelon" in parts[:-1] else len(parts) - 2
        found = _SHORT_PATHS[file] = "/".join(parts[max(start, 0) :])
    return found


class OperationSequence:
    """The operations of one group of ranks, counted."""

    def __init__(self, name: str, ranks: Sequence[int]):
        self.name, self.ranks = name, tuple(ranks)
        self.peers = format_ranks(self.ranks)
        self.last_number = 0
        """the number of its last operation"""
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        self.last_number = next(self._numbers)
        return self.last_number


class Waitable(Protocol):
    """As torch's `Work`: something to wait for."""

    def wait(self) -> Any: ...


class FlightRecorder:
    def __init__(self) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(BUFFER_BYTES)
        self._order = itertools.count()
        self.step = 0
        """the step under way, counted from 1; 0 before the first"""
        self.phase = "start"
        self.phase_start = time.time()
        """when the phase began"""
        self.mesh_position = ""
        """where this rank stands on the mesh, in words"""
        self.wait_s = 0.0
        """seconds in which this rank waited for others"""
        self.data_wait_s = 0.0
        """seconds in which it waited for data"""
        self.sequences: dict[str, OperationSequence] = {}
        self.on_phase: Callable[[int, str], None] | None = None
        """what an injected fault wants to know"""
        self.should_skip: Callable[[int, str, str], bool] | None = None
        """whether an injected fault leaves an operation out: (step, op, axis)"""
        self.on_send: Callable[[str, str, Any], None] | None = None
        """who looks at what this rank gives to others: (op, axis, tensor)"""
        self.on_receive: Callable[[str, str, Any], None] | None = None
        """and at what it gets from them"""
        self.device_waits: deque[tuple[int, Any, Any]] = deque(maxlen=4096)
        """(slot, event before, event after) of waits that a GPU does, not the host"""

    def map_to_file(self, path: Path) -> None:
        """From now on in a file, which outlives this process."""
        with open(path, "w+b") as file:
            file.truncate(BUFFER_BYTES)
            self._buffer = mmap.mmap(file.fileno(), BUFFER_BYTES)

    def new_sequence(self, ranks: Sequence[int], channel: str = "") -> OperationSequence:
        """A new group of ranks; ranks that make the same groups in the same order give them the same names."""
        base = format_ranks(ranks) + channel
        for number in itertools.count(1):
            name = base if number == 1 else f"{base}#{number}"
            if name not in self.sequences:
                break
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
        """An operation starts: its slot."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _HIDDEN_FILES and frame.f_back is not None:
            frame = frame.f_back
        order = next(self._order)
        start = order % NUM_SLOTS * SLOT_BYTES
        site = f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        # As many peers as fit: the lane's name has the group.
        who = peers or sequence.peers
        text = encode_entry(
            *(op, axis, sequence.name, sequence.next_number(), who if len(who) < 64 else "", str(list(shape))),
            *(str(dtype).removeprefix("torch."), site, self.step, self.phase),
        )[:_TEXT_BYTES]
        buffer = self._buffer
        SLOT_HEADER.pack_into(buffer, start, EMPTY, order, time.time(), 0.0, 0.0, len(text))
        buffer[start + SLOT_HEADER.size : start + SLOT_HEADER.size + len(text)] = text
        buffer[start : start + 1] = STARTED
        return order

    def _mark(self, slot: int, flag: bytes, field: int, now: float) -> None:
        start = slot % NUM_SLOTS * SLOT_BYTES
        if SLOT_HEADER.unpack_from(self._buffer, start)[1] != slot:
            return  # so many came after it that its slot is another's
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

    def record_failure(self, slot: int) -> None:
        self._mark(slot, FAILED, 2, time.time())

    @contextmanager
    def blocking_operation(self, op: str, axis: str, sequence: OperationSequence) -> Iterator[None]:
        """Around an operation that blocks."""
        slot = self.record_start(op, axis, sequence)
        since = self.record_wait(slot)
        try:
            yield
        except BaseException:
            self.record_failure(slot)
            raise
        self.record_end(slot, since)

    def _set_phase(self, phase: str) -> None:
        self.phase, self.phase_start = phase, time.time()
        PHASE_RECORD.pack_into(self._buffer, NUM_SLOTS * SLOT_BYTES, self.step, self.phase_start, phase.encode()[:16])

    def enter_phase(self, phase: str) -> None:
        """Another phase begins, of the same step."""
        if self.phase in NON_TRAINING_PHASES and phase in ("forward", "data"):
            return
        self._set_phase(phase)
        if self.on_phase is not None:
            self.on_phase(self.step, phase)

    @contextmanager
    def phase_scope(self, phase: str) -> Iterator[None]:
        """A phase with an end, after which it is the phase before it again."""
        before, waited, loaded = self.phase, self.wait_s, self.data_wait_s
        self.enter_phase(phase)
        try:
            yield
        finally:
            self._set_phase(before)
            if phase in NON_TRAINING_PHASES:  # no part of any step
                self.wait_s, self.data_wait_s = waited, loaded

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Around what fetches data."""
        begun, waited = time.time(), self.wait_s
        with self.phase_scope("data"):
            yield
        self.data_wait_s += time.time() - begun - (self.wait_s - waited)

    def longest_wait(self) -> float:
        """Seconds that a thread of this rank has waited in one operation; nothing is decoded but times.

        A collective's time-out runs from its start, a message's from when somebody waits for it.
        """
        now, longest = time.time(), 0.0
        for start in range(0, NUM_SLOTS * SLOT_BYTES, SLOT_BYTES):
            if self._buffer[start : start + 1] == WAITING:
                _, _, started, waiting, _, length = SLOT_HEADER.unpack_from(self._buffer, start)
                message = bytes(self._buffer[start + SLOT_HEADER.size : start + SLOT_HEADER.size + 5]) in (
                    b"send\t",
                    b"recei",
                )
                if now - waiting > MIN_WAIT_S and length:
                    longest = max(longest, now - (waiting if message else started))
        return longest

    def entries(self) -> list[RecorderEntry]:
        return read_entries(self._buffer[:])

    def poll_device_waits(self) -> None:
        """Of waits that a GPU does: those that are over have ended."""
        while self.device_waits:
            slot, before, after = self.device_waits[0]
            if not after.query():
                return
            with contextlib.suppress(IndexError):
                self.device_waits.popleft()
            self._mark(slot, ENDED, 2, time.time())
            self.wait_s += before.elapsed_time(after) / 1e3


class RecordedWork:
    """The handle of an operation whose waiting is noted."""

    def __init__(
        self,
        recorder: FlightRecorder,
        slot: int,
        work: Waitable,
        on_device: bool = False,
        received: tuple[str, str, Any] | None = None,
    ):
        """`brings` is (op, axis, tensor): what others have made of the tensor when it is through."""
        self._recorder, self._slot, self._work, self._on_device = recorder, slot, work, on_device
        self._received = received

    def wait(self) -> None:
        if self._on_device:
            self._wait_on_device()
        else:
            self._wait_on_host()
        if self._received is not None and self._recorder.on_receive is not None:
            self._recorder.on_receive(*self._received)

    def _wait_on_host(self) -> None:
        recorder, slot = self._recorder, self._slot
        since = recorder.record_wait(slot)
        try:
            self._work.wait()
        except BaseException:
            recorder.record_failure(slot)
            raise
        recorder.record_end(slot, since)

    def _wait_on_device(self) -> None:
        """The host goes on at once, and the GPU's queue waits: events before and after say for how long."""
        import torch

        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self._recorder.record_wait(self._slot)
        try:
            self._work.wait()
        except BaseException:
            self._recorder.record_failure(self._slot)
            raise
        after.record()
        self._recorder.device_waits.append((self._slot, before, after))
