"""`Collective`: one collective operation of a step, as every strategy's cost function describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

WIRE_FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""wire bytes of a rank are this times (n - 1) / n of the bytes; of a send or broadcast, the bytes"""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that every rank issues `count` times in a step."""

    op: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send"""
    axis: str
    """the mesh axis it runs over"""
    bytes: int
    """bytes of the full tensor: the reduced one, or the one gathered or scattered"""
    count: int = 1
    """times in a step"""
    overlapped: bool = False
    """compute that does not need its result runs at the same time"""
    purpose: str = ""
    """what it communicates, in a word or two"""


def count_collectives(collectives: Iterable[Collective]) -> Counter[tuple[str, str, int]]:
    """Count how often each (op, axis, bytes) is issued in a step; transparency tests count the same at run time."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for item in collectives:
        if item.count:
            counted[item.op, item.axis, item.bytes] += item.count
    return counted


def wire_bytes(collective: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends."""
    return size * (WIRE_FACTOR[collective] * (ranks - 1) / ranks if collective in WIRE_FACTOR else 1.0)
