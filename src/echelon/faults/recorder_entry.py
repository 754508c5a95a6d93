"""One operation of a ring, as it is read back: perhaps by another process, after this one is gone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NUM_SLOTS, SLOT_BYTES = 128, 256
SLOT_HEADER = struct.Struct("<cQdddH")
"""flag, order, time of start, of waiting, of end, length of the text"""
TIMESTAMP = struct.Struct("<d")
PHASE_RECORD = struct.Struct("<Qd16s")
"""behind the slots: the step under way, since when it is in its phase, and that"""
BUFFER_BYTES = NUM_SLOTS * SLOT_BYTES + PHASE_RECORD.size
STARTED, WAITING, ENDED, FAILED, EMPTY = b"s", b"w", b"e", b"f", b"\0"
POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True)
class RecorderEntry:
    flag: str
    """s: started, w: a thread waits for it, e: it ended, f: waiting for it failed"""
    order: int
    start_time: float
    wait_start: float
    """when somebody began to wait for it; 0 before"""
    end_time: float
    op: str
    axis: str
    sequence: str
    """the group of ranks and, of messages, the channel: numbers are counted on it"""
    number: int
    peers: tuple[int, ...]
    """the ranks that must come to it too"""
    shape: str
    dtype: str
    site: str
    """file:line of who asked for it"""
    step: int
    phase: str

    @property
    def is_p2p(self) -> bool:
        return self.op in POINT_TO_POINT

    @property
    def is_pending(self) -> bool:
        """Somebody waits, or waited until it failed."""
        return self.flag in "wf"

    @property
    def description(self) -> str:
        """`all_reduce number 12 on axis dp`."""
        return f"{self.op} number {self.number} on axis {self.axis}"

    @property
    def signature(self) -> tuple[str, str, str]:
        """What must be alike on all ranks. Rows of an all-to-all may differ."""
        return (self.op, "", self.dtype) if self.op == "all_to_all" else (self.op, self.shape, self.dtype)


def encode_entry(
    op: str, axis: str, lane: str, number: int, peers: str, shape: str, dtype: str, site: str, step: int, phase: str
) -> bytes:
    text = f"{op}\t{axis}\t{lane}\t{number}\t{peers}\t{shape}\t{dtype}\t{step}\t{phase}\t{site}"
    return text.encode("utf-8", "replace")


def format_ranks(ranks: Sequence[int]) -> str:
    """`0,1,2,3` or, of many in even steps, `0:64:2`."""
    steps = {second - first for first, second in pairwise(ranks)}
    if len(ranks) > 4 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))


def parse_ranks(text: str) -> tuple[int, ...]:
    if ":" in text:
        return tuple(range(*(int(part) for part in text.split(":"))))
    return tuple(int(part) for part in text.split(",") if part)


def read_phase(buffer: bytes) -> tuple[int, float, str]:
    """(step, since when in its phase, phase); (0, 0.0, "") before the first."""
    step, since, phase = PHASE_RECORD.unpack_from(buffer, NUM_SLOTS * SLOT_BYTES)
    return step, since, phase.rstrip(b"\0").decode()


def read_entries(buffer: bytes | bytearray) -> list[RecorderEntry]:
    """All operations of a ring, oldest first. A slot that is being written now is left out."""
    found = []
    for start in range(0, min(len(buffer) // SLOT_BYTES, NUM_SLOTS) * SLOT_BYTES, SLOT_BYTES):
        flag, order, started, waiting, ended, length = SLOT_HEADER.unpack_from(buffer, start)
        if flag == EMPTY or not length:
            continue
        text = bytes(buffer[start + SLOT_HEADER.size : start + SLOT_HEADER.size + length])
        parts = text.decode("utf-8", "replace").split("\t")
        if len(parts) != 10:
            continue
        op, axis, lane, number, peers, shape, dtype, step, phase, site = parts
        members = parse_ranks(peers)
        found.append(
            RecorderEntry(
                *(flag.decode(), order, started, waiting, ended, op, axis, lane, int(number), members),
                *(shape, dtype, site, int(step), phase),
            )
        )
    return sorted(found, key=lambda entry: entry.order)
