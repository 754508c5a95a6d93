"""What a strategy says of its own cost: the collectives it issues and the bytes it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective, issued some number of times in a step by every rank."""

    op: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send"""
    axis: str
    """the mesh axis it runs over"""
    bytes: int
    """the size of the whole tensor: the reduced one, or the one gathered or scattered"""
    count: int = 1
    """how many times in a step"""
    overlapped: bool = False
    """it runs beside compute that does not need its result"""
    purpose: str = ""
    """what it is for, in a word or two"""


def count_collectives(collectives: Iterable[Collective]) -> Counter[tuple[str, str, int]]:
    """How often each (kind, axis, bytes) is issued in a step: what the transparency tests count for real."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for item in collectives:
        if item.count:
            counted[item.op, item.axis, item.bytes] += item.count
    return counted
