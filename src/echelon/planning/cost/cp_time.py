"""Seconds that context parallelism adds to a microbatch: messages that attention does not hide, and merging.

[Note: around the ring]

A ring of n ranks attends in n blocks, and keys and values go on while a block is at work; in backward also the
gradients of those of the block before. What is seen of a step is what its messages take longer than its block:

    forward     n - 1 times   beyond(keys and values, attention / n)
    backward    once          beyond(keys and values, attention / n)
                n - 2 times   beyond(keys and values + gradients, attention / n)
                once          gradients: they come home after the last block, and nothing is left to hide them

Nothing hides what is gathered, scattered or exchanged. What merges results and adds up gradients takes its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.planning.calibrate.constants import Constants
from echelon.planning.cluster.link_time import exposed_time
from echelon.planning.cost.work import HOPPER, StepWork


@dataclass(frozen=True, kw_only=True)
class CpTime:
    """Of one microbatch through all layers, recomputation included."""

    hop: Any
    """that keys and values take to the next rank of a ring"""
    block: Any
    """that a block of attention takes beside it, forward"""
    exposed: Any
    """that messages take and attention does not hide"""
    merge: Any
    """that results and gradients of blocks take to be brought together, and what arrives to be put in order"""

    @property
    def total(self) -> Any:
        return self.exposed + self.merge


def cp_time(work: StepWork, c: Constants, forward: Any, backward: Any) -> CpTime:
    """Given the seconds of attention, forward and backward. See [Note: around the ring]."""
    inside, outside = link_bandwidths(work, c)
    steps, link = work.ring_steps, np.where(work.ring_near > 0, inside, outside)
    latency = np.where(steps > 1, work.latency * work.layers, 0.0)
    hop, gradients = work.ring_bytes / link + latency, work.ring_gradients / link + latency
    stream = work.memory * c.streaming
    merging, merging_back = work.cp_moved / stream, work.cp_moved_back / stream
    block, block_back = (forward + merging) / steps, (backward + merging_back) / steps
    around = (steps - 1) * exposed_time(hop, block)
    around_back = (
        exposed_time(hop, block_back) + np.maximum(steps - 2, 0) * exposed_time(hop + gradients, block_back) + gradients
    )
    together = np.maximum(work.cp_inside / inside, work.cp_outside / outside) + work.latency * work.cp_messages
    again = 1 + work.repeated + work.repeated_attention
    return CpTime(
        hop=hop,
        block=block,
        exposed=again * around + around_back + together,
        merge=again * merging + merging_back,
    )


def link_bandwidths(work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Bytes per second of links inside a node and between nodes."""
    reached = np.where(work.generation < HOPPER, c.links_old, 1.0)
    return work.inside * c.inside * reached, work.outside * c.outside * reached
