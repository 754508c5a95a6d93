"""One operation of a ring, as it is read back: perhaps by another process, after this one is gone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SLOTS, WIDTH = 128, 256
FORM = struct.Struct("<cQdddH")
"""flag, order, time of start, of waiting, of end, length of the text"""
TIME = struct.Struct("<d")
AT = struct.Struct("<Qd16s")
"""behind the slots: the step under way, since when it is in its phase, and that"""
BYTES = SLOTS * WIDTH + AT.size
STARTED, WAITING, ENDED, FAILED, EMPTY = b"s", b"w", b"e", b"f", b"\0"
POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True)
class Entry:
    flag: str
    """s: started, w: a thread waits for it, e: it ended, f: waiting for it failed"""
    order: int
    started: float
    waiting: float
    """when somebody began to wait for it; 0 before"""
    ended: float
    op: str
    axis: str
    lane: str
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
    def point_to_point(self) -> bool:
        return self.op in POINT_TO_POINT

    @property
    def is_open(self) -> bool:
        """Somebody waits, or waited until it failed."""
        return self.flag in "wf"

    @property
    def what(self) -> str:
        """`all_reduce number 12 on axis dp`."""
        return f"{self.op} number {self.number} on axis {self.axis}"

    @property
    def signature(self) -> tuple[str, str, str]:
        """What must be alike on all ranks. Rows of an all-to-all may differ."""
        return (self.op, "", self.dtype) if self.op == "all_to_all" else (self.op, self.shape, self.dtype)


def text_of(
    op: str, axis: str, lane: str, number: int, peers: str, shape: str, dtype: str, site: str, step: int, phase: str
) -> bytes:
    text = f"{op}\t{axis}\t{lane}\t{number}\t{peers}\t{shape}\t{dtype}\t{step}\t{phase}\t{site}"
    return text.encode("utf-8", "replace")


def spelled(ranks: Sequence[int]) -> str:
    """`0,1,2,3` or, of many in even steps, `0:64:2`."""
    steps = {second - first for first, second in pairwise(ranks)}
    if len(ranks) > 4 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))


def read_ranks(text: str) -> tuple[int, ...]:
    if ":" in text:
        return tuple(range(*(int(part) for part in text.split(":"))))
    return tuple(int(part) for part in text.split(",") if part)


def phase_of(buffer: bytes) -> tuple[int, float, str]:
    """(step, since when in its phase, phase); (0, 0.0, "") before the first."""
    step, since, phase = AT.unpack_from(buffer, SLOTS * WIDTH)
    return step, since, phase.rstrip(b"\0").decode()


def entries(buffer: bytes | bytearray) -> list[Entry]:
    """All operations of a ring, oldest first. A slot that is being written now is left out."""
    found = []
    for start in range(0, min(len(buffer) // WIDTH, SLOTS) * WIDTH, WIDTH):
        flag, order, started, waiting, ended, length = FORM.unpack_from(buffer, start)
        if flag == EMPTY or not length:
            continue
        text = bytes(buffer[start + FORM.size : start + FORM.size + length])
        parts = text.decode("utf-8", "replace").split("\t")
        if len(parts) != 10:
            continue
        op, axis, lane, number, peers, shape, dtype, step, phase, site = parts
        members = read_ranks(peers)
        found.append(
            Entry(
                *(flag.decode(), order, started, waiting, ended, op, axis, lane, int(number), members),
                *(shape, dtype, site, int(step), phase),
            )
        )
    return sorted(found, key=lambda entry: entry.order)
