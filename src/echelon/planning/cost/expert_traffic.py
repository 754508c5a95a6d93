"""Tokens on their way to experts: which bytes cross between nodes, and whether it pays to go by way of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.layout.collective import Collective
from echelon.parallel.ep.cost import Routed, collectives, nodes_of
from echelon.parallel.ep.expert_parallel import CEILING, TOGETHER
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.cluster.link_time import on_the_wire
from echelon.planning.scenario import Case

SCORE_BYTES = 4
ROWS = "all_to_all"
"""the kind of messages of which busier ranks have more"""


@dataclass(frozen=True, kw_only=True)
class ToExperts:
    """What passes the links of the busiest rank, for a microbatch through all layers."""

    inside: float = 0.0
    """bytes between devices of a node"""
    outside: float = 0.0
    messages: int = 0


def to_experts(case: Case) -> ToExperts:
    inside = outside = 0.0
    messages = 0
    crowd = case.crowd * _again(case)
    for item, wire, far in _wires(case):
        wire *= crowd if item.kind == ROWS else 1.0
        inside, outside = inside + wire * (1 - far), outside + wire * far
        messages += item.count
    return ToExperts(inside=inside, outside=outside, messages=messages)


def bytes_of_a_token(case: Case) -> float:
    """That pass a link for a token and a layer with experts, there and back, all passes together; of an even load."""
    tokens = case.tokens / case.layout.tp * case.shape.mixtures
    return sum(wire for item, wire, _ in _wires(case) if item.kind == ROWS) / max(tokens, 1)


def _wires(case: Case) -> Iterator[tuple[Collective, float, float]]:
    """Messages of a microbatch, the bytes of each that pass a link, and the share of these that leaves a node."""
    layout, per_node = case.layout, case.cluster.per_node
    ranks, inner = layout.ep * layout.etp, layout.ep_inner
    if not case.shape.experts:
        return
    members = {
        "tp": (layout.tp, 0.0),
        "cp": (layout.cp, _far(layout.cp * layout.tp, per_node)),
        TOGETHER: (ranks, _far(ranks, per_node)),
        f"{TOGETHER}/{inner}": (inner, 0.0),
        f"{TOGETHER}%{inner}": (ranks // inner, 1.0),
    }
    for item in collectives(replace(layout, accumulate=1), routed_of(case)):
        among, far = members[item.axis]
        yield item, on_the_wire(item.kind, item.bytes, among) * item.count, far


def _far(ranks: int, per_node: int) -> float:
    """Share of what a rank sends to so many, itself among them, that leaves its node."""
    return max(0.0, 1 - per_node / ranks)


def _again(case: Case) -> float:
    """In rounds nothing is kept (rounds.py): in backward rows come once more."""
    legs = 6 if case.layout.recompute.partition(":")[0] in ("full", "every", "sqrt") else 4
    return 1 + 1 / legs if case.crowd > CEILING else 1.0


def routed_of(case: Case) -> Routed:
    shape = case.shape
    return Routed(
        layers=shape.mixtures,
        sequences=case.layout.microbatch,
        seq_len=case.seq_len,
        width=shape.width,
        element_bytes=case.element_bytes,
        experts=shape.experts,
        k=shape.top_k,
        score_bytes=SCORE_BYTES,
    )


def inner_of(cluster: Cluster, ep: int, k: int) -> int:
    """`ep_inner` for so many ranks of experts: a node's ranks where two hops take less time than one, else 1.

    Per row of a token, in what a rank's links take for it.
    """
    per_node, nodes = cluster.per_node, ep // max(cluster.per_node, 1)
    if nodes < 2 or ep % per_node or per_node < 2:
        return 1
    near, far = 1 / cluster.inside.bandwidth, 1 / cluster.outside.bandwidth
    direct = k * (per_node / ep * near + (1 - per_node / ep) * far)
    by_nodes = nodes_of(k, nodes) * (nodes - 1) / nodes * far + k * (per_node - 1) / per_node * near
    return per_node if by_nodes < direct else 1
