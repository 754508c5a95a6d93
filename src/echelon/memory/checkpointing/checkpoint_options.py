"""The ways a layer can go under a budget, from what was counted of it. No torch: a plan chooses among the same.

none            keeps everything
ops             makes again what operators between products made; it is read and written where that happens
selective       does attention's core again
ops+selective   both
full            keeps its input, and does everything again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.memory.checkpointing.knapsack import Way

SPEED = {"cuda": (4e14, 2.5e12), "cpu": (5e10, 1e10)}
"""FLOP/s and bytes/s, to weigh products against what only passes memory. Constants, so that all ranks choose alike"""


@dataclass
class Counted:
    """Of one forward of a layer."""

    kept: float = 0
    """bytes that autograd saves"""
    core: float = 0
    """of them, what attention's core saves"""
    whole: float = 0
    """bytes of what is saved and of what the layer is given"""
    entry: float = 0
    """bytes of what the layer is given, as it would be kept"""
    products: float = 0
    """bytes that products and attention make"""
    flops: float = 0.0
    again: float = 0.0
    """of them, those that a repetition does: it ends when the last thing is saved"""
    core_flops: float = 0.0
    core_again: float = 0.0


def ways_of(found: Mapping[str, Counted], device: str, *, copied: bool = False) -> list[Way]:
    """What a layer can do, of which these were counted; the last is `full`.

    `copied`: while a layer is repeated, its input is there twice.
    """
    per_s, bytes_per_s = SPEED.get(device, SPEED["cuda"])
    plain = found["none"]
    none, core = plain.kept, plain.core
    some = [Way(form="none", kept=none, inside=none, cost=0.0)]
    if "ops" in found:
        kept = found["ops"].kept
        remade = max(none - kept, 0.0)
        some.append(Way(form="ops", kept=kept, inside=max(kept, found["ops"].whole), cost=3 * remade / bytes_per_s))
    if "selective" in found:
        kept = found["selective"].kept
        seconds = plain.core_again / per_s + 2 * core / bytes_per_s
        some.append(Way(form="selective", kept=kept, inside=kept + core, cost=seconds))
    if "ops+selective" in found:
        kept = found["ops+selective"].kept
        seconds = sum(way.cost for way in some)
        some.append(Way(form="ops+selective", kept=kept, inside=kept + core, cost=seconds))
    twice = plain.entry if copied else 0.0
    seconds = plain.again / per_s + 2 * none / bytes_per_s
    full = Way(form="full", kept=plain.entry, inside=plain.whole + twice, cost=seconds)
    # What keeps no less than something cheaper is no way to go.
    return [way for way in some if way.kept <= none and way.cost <= full.cost] + [full]
