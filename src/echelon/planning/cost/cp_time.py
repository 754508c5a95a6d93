"""Seconds that context parallelism adds to a microbatch: exposed communication, and merging of partial results.

[Note: around the ring]

A ring of n ranks computes attention in n blocks. While a block runs, its keys and values travel to the next rank; in
backward the gradients of the previous block's travel too. A step exposes what its transfers take longer than its block:

    forward     n - 1 times   exposed(keys and values, attention / n)
    backward    once          exposed(keys and values, attention / n)
                n - 2 times   exposed(keys and values + gradients, attention / n)
                once          gradients: they return after the last block, which leaves nothing to overlap with

Gathers, scatters and exchanges of heads are exposed in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.planning.cluster.link_time import exposed_time
from echelon.planning.cost.reached_rates import ReachedRates
from echelon.planning.cost.step_work import MicrobatchWork, Number


@dataclass(frozen=True, kw_only=True)
class CpTime:
    """Seconds of one microbatch through all layers, recomputation included."""

    hop: Number
    """of keys and values to the next rank of a ring"""
    block: Number
    """of one block of attention, forward"""
    exposed: Number
    """communication that attention does not hide"""
    merge: Number
    """merging of the blocks' results and gradients, reordering of received tensors"""

    @property
    def total(self) -> Number:
        return self.exposed + self.merge


def cp_time(work: MicrobatchWork, rates: ReachedRates, forward: Number, backward: Number) -> CpTime:
    """Time cp, given the seconds of attention, forward and backward. See [Note: around the ring]."""
    cp, steps = work.cp, work.cp.ring_steps
    link = np.where(cp.ring_in_node > 0, rates.intra_node_bandwidth, rates.inter_node_bandwidth)
    latency = np.where(steps > 1, rates.latency * work.num_layers, 0.0)
    hop, gradient_hop = cp.ring_bytes / link + latency, cp.ring_grad_bytes / link + latency
    merge = cp.memory_bytes / rates.memory_bandwidth
    merge_backward = cp.memory_bytes_backward / rates.memory_bandwidth
    block, block_backward = (forward + merge) / steps, (backward + merge_backward) / steps
    beside, beside_backward = rates.hides_communication * block, rates.hides_communication * block_backward
    ring = (steps - 1) * exposed_time(hop, beside)
    both = exposed_time(hop + gradient_hop, beside_backward)
    ring_backward = exposed_time(hop, beside_backward) + np.maximum(steps - 2, 0) * both + gradient_hop
    intra_node = cp.intra_node_bytes / rates.intra_node_bandwidth
    inter_node = cp.inter_node_bytes / rates.inter_node_bandwidth
    collectives = np.maximum(intra_node, inter_node) + rates.latency * cp.num_collectives
    passes = 1 + work.recompute.layers + work.recompute.attention
    exposed = passes * ring + ring_backward + collectives
    return CpTime(hop=hop, block=block, exposed=exposed, merge=passes * merge + merge_backward)
