"""Rank placement by link speed: which of pp and dp is the outer mesh axis.

[Note: what the order changes]

tp and cp are always innermost. One choice remains: neighbouring ranks hold the replicas of one stage, or the stages of
one replica. Two nodes of four devices, dp=4,pp=2:

    order=("pp", "dp"): dp stays in a node             order=("dp", "pp"): stages stay in a node

      node 0              node 1                         node 0              node 1
    +-------------+     +-------------+                +-------------+     +-------------+
    | s0 s0 s0 s0 | ==> | s1 s1 s1 s1 |                | s0>s1 s0>s1 | <=> | s0>s1 s0>s1 |
    +-------------+     +-------------+                +-------------+     +-------------+
      gradients: fast links                              gradients: slow links
      activations between stages: slow links             activations between stages: fast links

The better order leaves less exposed communication over the slowest links its bytes cross. The planner predicts the
traffic (planning/cost/rank_placement.py); `Mesh` takes the order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from echelon.layout.layout import Layout
from echelon.layout.mesh import Mesh, RankGroup


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """Bandwidths between devices."""

    devices_per_node: int
    """ranks 0 to devices_per_node - 1 are on the first node, and so on"""
    intra_node: float
    """bytes per second that a device sends to another one of its node"""
    inter_node: float
    """bytes per second that a device sends to another node while its neighbours do the same"""

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.intra_node <= 0 or self.inter_node <= 0:
            raise ValueError(f"links need at least one device per node and speeds above zero ({self})")


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """Bytes that one rank sends in a step on the two axes, and the compute that overlaps them."""

    dp_bytes: float
    """bytes that a rank sends in its gradient and parameter collectives"""
    pp_bytes: float
    """bytes that a rank sends to its neighbouring stages"""
    dp_overlap_s: float = 0.0
    """seconds of compute that overlap the dp collectives"""
    pp_overlap_s: float = 0.0
    """seconds of compute that overlap the sends between stages"""


def choose_rank_order(layout: Layout, links: LinkSpeeds, traffic: StepTraffic) -> tuple[str, str]:
    """Return the order of pp and dp, outer first, with the smaller exposed time. A tie keeps pp outermost.

    See [Note: what the order changes]. The result is `Mesh`'s `order`.
    """
    if layout.dp == 1 or layout.pp == 1:
        return ("pp", "dp")  # one axis has a single rank: both orders are equal
    pp_outside, dp_outside = Mesh(layout, ("pp", "dp")), Mesh(layout, ("dp", "pp"))
    better = exposed_comm_s(dp_outside, links, traffic) < exposed_comm_s(pp_outside, links, traffic)
    return dp_outside.order if better else pp_outside.order


def exposed_comm_s(mesh: Mesh, links: LinkSpeeds, traffic: StepTraffic) -> float:
    """Return the seconds of dp and pp communication in a step that no compute overlaps, in this order of ranks."""
    exposed = 0.0
    if mesh.layout.dp > 1:
        speed = min(_collective_speed(group, links) for group in mesh.groups("dp"))
        exposed += max(0.0, traffic.dp_bytes / speed - traffic.dp_overlap_s)
    if mesh.layout.pp > 1:
        speed = min(_p2p_speed(group, links) for group in mesh.groups("pp"))
        exposed += max(0.0, traffic.pp_bytes / speed - traffic.pp_overlap_s)
    return exposed


def _collective_speed(group: RankGroup, links: LinkSpeeds) -> float:
    """Return the bytes per second of a rank in a collective. Members on one node share its links to other nodes."""
    on_node = Counter(rank // links.devices_per_node for rank in group)
    if len(on_node) == 1:
        return links.intra_node
    return min(links.intra_node, links.inter_node * min(on_node.values()))


def _p2p_speed(group: RankGroup, links: LinkSpeeds) -> float:
    """Return the bytes per second of the slowest hop: in steady state every stage waits for it."""
    nodes = [rank // links.devices_per_node for rank in group]
    return links.intra_node if len(set(nodes)) == 1 else min(links.intra_node, links.inter_node)
