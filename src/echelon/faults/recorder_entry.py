"""One operation of the flight recorder, and its binary encoding, which another process may read."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NUM_SLOTS, SLOT_BYTES = 128, 256
SLOT_HEADER = struct.Struct("<cQdddH")
"""flag, order, start time, wait start, end time, length of the text"""
TIMESTAMP = struct.Struct("<d")
PHASE_RECORD = struct.Struct("<Qd16s")
"""after the slots: current step, start of the phase, phase"""
BUFFER_BYTES = NUM_SLOTS * SLOT_BYTES + PHASE_RECORD.size
STARTED, WAITING, ENDED, FAILED, EMPTY = b"s", b"w", b"e", b"f", b"\0"
POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True)
class RecorderEntry:
    """A collective or p2p transfer, as the flight recorder stored it."""

    flag: str
    """s: started, w: a thread waits for it, e: ended, f: the wait failed"""
    order: int
    start_time: float
    wait_start: float
    """when a thread began to wait for it; 0 before"""
    end_time: float
    op: str
    axis: str
    sequence: str
    """the process group, or p2p channel, that `number` counts the operations of"""
    number: int
    peers: tuple[int, ...]
    """the ranks that must run it too"""
    shape: str
    dtype: str
    site: str
    """file:line of the caller"""
    step: int
    phase: str

    @property
    def is_p2p(self) -> bool:
        return self.op in POINT_TO_POINT

    @property
    def is_pending(self) -> bool:
        """Whether a thread waits for it, or waited until it failed."""
        return self.flag in "wf"

    @property
    def description(self) -> str:
        """E.g. `all_reduce number 12 on axis dp`."""
        return f"{self.op} number {self.number} on axis {self.axis}"

    @property
    def signature(self) -> tuple[str, str, str]:
        """What must be equal on all ranks; the sizes of an all-to-all may differ."""
        return (self.op, "", self.dtype) if self.op == "all_to_all" else (self.op, self.shape, self.dtype)

    @property
    def key(self) -> tuple[tuple[str, str, str], str]:
        """Its signature and call site."""
        return self.signature, self.site


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `0,1,2,3` or, for many in even steps, as `0:64:2`."""
    steps = {second - first for first, second in pairwise(ranks)}
    if len(ranks) > 4 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))


def parse_ranks(text: str) -> tuple[int, ...]:
    if ":" in text:
        return tuple(range(*(int(part) for part in text.split(":"))))
    return tuple(int(part) for part in text.split(",") if part)


def read_phase(buffer: bytes) -> tuple[int, float, str]:
    """(step, start of the phase, phase); (0, 0.0, "") before the first."""
    step, since, phase = PHASE_RECORD.unpack_from(buffer, NUM_SLOTS * SLOT_BYTES)
    return step, since, phase.rstrip(b"\0").decode()


def read_entries(buffer: bytes | bytearray) -> list[RecorderEntry]:
    """Decode all operations, oldest first, without a slot that is being written now."""
    decoded = []
    for start in range(0, min(len(buffer) // SLOT_BYTES, NUM_SLOTS) * SLOT_BYTES, SLOT_BYTES):
        flag, order, started, waiting, ended, length = SLOT_HEADER.unpack_from(buffer, start)
        if flag == EMPTY or not length:
            continue
        text = bytes(buffer[start + SLOT_HEADER.size : start + SLOT_HEADER.size + length])
        parts = text.decode("utf-8", "replace").split("\t")
        if len(parts) != 10:
            continue
        op, axis, sequence, number, peers, shape, dtype, step, phase, site = parts
        operation = op, axis, sequence, int(number), parse_ranks(peers), shape, dtype, site, int(step), phase
        decoded.append(RecorderEntry(flag.decode(), order, started, waiting, ended, *operation))
    return sorted(decoded, key=lambda entry: entry.order)
