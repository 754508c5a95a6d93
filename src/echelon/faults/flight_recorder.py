"""What this rank did last: every collective and every message that it started, waited for and ended.

[Note: a black box]

A rank that is killed cannot tell what it was doing, and one that hangs cannot be asked. So the ring is bytes of fixed
size, mapped from a file where the launcher gave a folder: what was written is there after any ending, and another
process reads it while this one is stuck.

    slot: flag | order | started | waiting since | ended | op, axis, lane, number, peers, shape, type, step, phase, site
    end:  step | since | phase

Numbers count the operations of a lane, which is a process group, or one channel of messages between two ranks. Ranks
that do the same things in the same order have the same numbers. Any thread may write: a slot belongs to who drew it.

One process is one rank, so there is one ring in a process: `here`.
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
    AT,
    BYTES,
    EMPTY,
    ENDED,
    FAILED,
    FORM,
    SLOTS,
    STARTED,
    TIME,
    WAITING,
    WIDTH,
    Entry,
    entries,
    spelled,
    text_of,
)

_ROOM = WIDTH - FORM.size
_HIDDEN = {__file__, contextlib.__file__}
_SHORT: dict[str, str] = {}
LEAST = 0.5
"""seconds before a wait is worth a thought"""
STICKY = ("evaluation", "save")
"""phases inside of which forward is not training's"""


def hide(file: str) -> None:
    """Lines of this file are not whose fault an operation is: its callers are told instead."""
    _HIDDEN.add(file)


def short(file: str) -> str:
    """A file's name as people look for it: from our package on, or its last two parts."""
    found = _SHORT.get(file)
    if found is None:
        parts = Path(file).parts
        start = len(parts) - 1 - parts[::-1].index("echelon") if "echelon" in parts[:-1] else len(parts) - 2
        found = _SHORT[file] = "/".join(parts[max(start, 0) :])
    return found


class Lane:
    """The operations of one group of ranks, counted."""

    def __init__(self, name: str, ranks: Sequence[int]):
        self.name, self.ranks = name, tuple(ranks)
        self.peers = spelled(self.ranks)
        self.last = 0
        """the number of its last operation"""
        self._numbers = itertools.count(1)

    def next(self) -> int:
        self.last = next(self._numbers)
        return self.last


class Waited(Protocol):
    """As torch's `Work`: something to wait for."""

    def wait(self) -> Any: ...


class Recorder:
    def __init__(self) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(BYTES)
        self._order = itertools.count()
        self.step = 0
        """the step under way, counted from 1; 0 before the first"""
        self.phase = "start"
        self.since = time.time()
        """when the phase began"""
        self.position = ""
        """where this rank stands on the mesh, in words"""
        self.waited = 0.0
        """seconds in which this rank waited for others"""
        self.loaded = 0.0
        """seconds in which it waited for data"""
        self.lanes: dict[str, Lane] = {}
        self.on_phase: Callable[[int, str], None] | None = None
        """what an injected fault wants to know"""
        self.leaves_out: Callable[[int, str, str], bool] | None = None
        """whether an injected fault leaves an operation out: (step, op, axis)"""
        self.on_sent: Callable[[str, str, Any], None] | None = None
        """who looks at what this rank gives to others: (op, axis, tensor)"""
        self.on_received: Callable[[str, str, Any], None] | None = None
        """and at what it gets from them"""
        self.device_waits: deque[tuple[int, Any, Any]] = deque(maxlen=4096)
        """(slot, event before, event after) of waits that a GPU does, not the host"""

    def keep_in(self, path: Path) -> None:
        """From now on in a file, which outlives this process."""
        with open(path, "w+b") as file:
            file.truncate(BYTES)
            self._buffer = mmap.mmap(file.fileno(), BYTES)

    def lane(self, ranks: Sequence[int], channel: str = "") -> Lane:
        """A new group of ranks; ranks that make the same groups in the same order give them the same names."""
        base = spelled(ranks) + channel
        for number in itertools.count(1):
            name = base if number == 1 else f"{base}#{number}"
            if name not in self.lanes:
                break
        self.lanes[name] = Lane(name, ranks)
        return self.lanes[name]

    def reset(self) -> None:
        """A run begins: what a process did before it, others did not."""
        self.lanes.clear()
        self.step, self.phase, self.since, self.position = 0, "start", time.time(), ""
        self.waited = self.loaded = 0.0
        self._buffer = bytearray(BYTES)

    def begin(
        self, op: str, axis: str, lane: Lane, shape: Sequence[int] = (), dtype: object = "", peers: str = ""
    ) -> int:
        """An operation starts: its slot."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _HIDDEN and frame.f_back is not None:
            frame = frame.f_back
        order = next(self._order)
        start = order % SLOTS * WIDTH
        site = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        # As many peers as fit: the lane's name has the group.
        who = peers or lane.peers
        text = text_of(
            *(op, axis, lane.name, lane.next(), who if len(who) < 64 else "", str(list(shape))),
            *(str(dtype).removeprefix("torch."), site, self.step, self.phase),
        )[:_ROOM]
        buffer = self._buffer
        FORM.pack_into(buffer, start, EMPTY, order, time.time(), 0.0, 0.0, len(text))
        buffer[start + FORM.size : start + FORM.size + len(text)] = text
        buffer[start : start + 1] = STARTED
        return order

    def _mark(self, slot: int, flag: bytes, field: int, now: float) -> None:
        start = slot % SLOTS * WIDTH
        if FORM.unpack_from(self._buffer, start)[1] != slot:
            return  # so many came after it that its slot is another's
        TIME.pack_into(self._buffer, start + 1 + 8 + 8 * field, now)
        self._buffer[start : start + 1] = flag

    def waits(self, slot: int) -> float:
        now = time.time()
        self._mark(slot, WAITING, 1, now)
        return now

    def ends(self, slot: int, since: float) -> None:
        now = time.time()
        self._mark(slot, ENDED, 2, now)
        self.waited += now - since

    def fails(self, slot: int) -> None:
        self._mark(slot, FAILED, 2, time.time())

    @contextmanager
    def doing(self, op: str, axis: str, lane: Lane) -> Iterator[None]:
        """Around an operation that blocks."""
        slot = self.begin(op, axis, lane)
        since = self.waits(slot)
        try:
            yield
        except BaseException:
            self.fails(slot)
            raise
        self.ends(slot, since)

    def _at(self, phase: str) -> None:
        self.phase, self.since = phase, time.time()
        AT.pack_into(self._buffer, SLOTS * WIDTH, self.step, self.since, phase.encode()[:16])

    def enter(self, phase: str) -> None:
        """Another phase begins, of the same step."""
        if self.phase in STICKY and phase in ("forward", "data"):
            return
        self._at(phase)
        if self.on_phase is not None:
            self.on_phase(self.step, phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase with an end, after which it is the phase before it again."""
        before, waited, loaded = self.phase, self.waited, self.loaded
        self.enter(phase)
        try:
            yield
        finally:
            self._at(before)
            if phase in STICKY:  # no part of any step
                self.waited, self.loaded = waited, loaded

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around what fetches data."""
        begun, waited = time.time(), self.waited
        with self.during("data"):
            yield
        self.loaded += time.time() - begun - (self.waited - waited)

    def longest_wait(self) -> float:
        """Seconds that a thread of this rank has waited in one operation; nothing is decoded but times.

        A collective's time-out runs from its start, a message's from when somebody waits for it.
        """
        now, longest = time.time(), 0.0
        for start in range(0, SLOTS * WIDTH, WIDTH):
            if self._buffer[start : start + 1] == WAITING:
                _, _, started, waiting, _, length = FORM.unpack_from(self._buffer, start)
                message = bytes(self._buffer[start + FORM.size : start + FORM.size + 5]) in (b"send\t", b"recei")
                if now - waiting > LEAST and length:
                    longest = max(longest, now - (waiting if message else started))
        return longest

    def entries(self) -> list[Entry]:
        return entries(self._buffer[:])

    def poll(self) -> None:
        """Of waits that a GPU does: those that are over have ended."""
        while self.device_waits:
            slot, before, after = self.device_waits[0]
            if not after.query():
                return
            with contextlib.suppress(IndexError):
                self.device_waits.popleft()
            self._mark(slot, ENDED, 2, time.time())
            self.waited += before.elapsed_time(after) / 1e3


class Recorded:
    """The handle of an operation whose waiting is noted."""

    def __init__(
        self,
        recorder: Recorder,
        slot: int,
        work: Waited,
        on_device: bool = False,
        brings: tuple[str, str, Any] | None = None,
    ):
        """`brings` is (op, axis, tensor): what others have made of the tensor when it is through."""
        self._recorder, self._slot, self._work, self._on_device = recorder, slot, work, on_device
        self._brings = brings

    def wait(self) -> None:
        if self._on_device:
            self._wait_on_device()
        else:
            self._wait_here()
        if self._brings is not None and self._recorder.on_received is not None:
            self._recorder.on_received(*self._brings)

    def _wait_here(self) -> None:
        recorder, slot = self._recorder, self._slot
        since = recorder.waits(slot)
        try:
            self._work.wait()
        except BaseException:
            recorder.fails(slot)
            raise
        recorder.ends(slot, since)

    def _wait_on_device(self) -> None:
        """The host goes on at once, and the GPU's queue waits: events before and after say for how long."""
        import torch

        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self._recorder.waits(self._slot)
        try:
            self._work.wait()
        except BaseException:
            self._recorder.fails(self._slot)
            raise
        after.record()
        self._recorder.device_waits.append((self._slot, before, after))


here = Recorder()
