"""Tokens on their way to experts: which bytes cross between nodes, and whether it pays to go by way of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echelon.layout.collective import Collective
from echelon.parallel.ep.cost import EP_ETP_AXIS, MAX_LOAD_FACTOR, MoeTraffic, collectives, expected_nodes
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.cluster.link_time import wire_bytes
from echelon.planning.cost.step_work import ExpertTraffic
from echelon.planning.scenario import Scenario

GATE_SCORE_BYTES = 4
TOKEN_EXCHANGE = "all_to_all"
"""the kind of messages of which busier ranks have more"""


def expert_traffic(scenario: Scenario) -> ExpertTraffic:
    inside = outside = 0.0
    messages = 0
    crowd = scenario.expert_load * _recompute_factor(scenario)
    for item, wire, far in _link_usage(scenario):
        wire *= crowd if item.op == TOKEN_EXCHANGE else 1.0
        inside, outside = inside + wire * (1 - far), outside + wire * far
        messages += item.count
    return ExpertTraffic(intra_node_bytes=inside, inter_node_bytes=outside, num_collectives=messages)


def all_to_all_bytes_per_token(scenario: Scenario) -> float:
    """That pass a link for a token and a layer with experts, there and back, all passes together; of an even load."""
    tokens = scenario.tokens / scenario.layout.tp * scenario.shape.num_moe_layers
    return sum(wire for item, wire, _ in _link_usage(scenario) if item.op == TOKEN_EXCHANGE) / max(tokens, 1)


def _link_usage(scenario: Scenario) -> Iterator[tuple[Collective, float, float]]:
    """Messages of a microbatch, the bytes of each that pass a link, and the share of these that leaves a node."""
    layout, per_node = scenario.layout, scenario.cluster.per_node
    ranks, inner = layout.ep * layout.etp, layout.ep_inner
    if not scenario.shape.experts:
        return
    members = {
        "tp": (layout.tp, 0.0),
        "cp": (layout.cp, _inter_node_share(layout.cp * layout.tp, per_node)),
        EP_ETP_AXIS: (ranks, _inter_node_share(ranks, per_node)),
        f"{EP_ETP_AXIS}/{inner}": (inner, 0.0),
        f"{EP_ETP_AXIS}%{inner}": (ranks // inner, 1.0),
    }
    for item in collectives(replace(layout, accumulate=1), routed_tokens(scenario)):
        among, far = members[item.axis]
        yield item, wire_bytes(item.op, item.bytes, among) * item.count, far


def _inter_node_share(ranks: int, per_node: int) -> float:
    """Share of what a rank sends to so many, itself among them, that leaves its node."""
    return max(0.0, 1 - per_node / ranks)


def _recompute_factor(scenario: Scenario) -> float:
    """In rounds nothing is kept (rounds.py): in backward rows come once more."""
    legs = 6 if scenario.layout.recompute.partition(":")[0] in ("full", "every", "sqrt") else 4
    return 1 + 1 / legs if scenario.expert_load > MAX_LOAD_FACTOR else 1.0


def routed_tokens(scenario: Scenario) -> MoeTraffic:
    shape = scenario.shape
    return MoeTraffic(
        layers=shape.num_moe_layers,
        sequences=scenario.layout.microbatch,
        seq_len=scenario.seq_len,
        width=shape.width,
        element_bytes=scenario.element_bytes,
        experts=shape.experts,
        top_k=shape.top_k,
        score_bytes=GATE_SCORE_BYTES,
    )


def choose_ep_inner(cluster: Cluster, ep: int, top_k: int) -> int:
    """`ep_inner` for so many ranks of experts: a node's ranks where two hops take less time than one, else 1.

    Per row of a token, in what a rank's links take for it.
    """
    per_node, nodes = cluster.per_node, ep // max(cluster.per_node, 1)
    if nodes < 2 or ep % per_node or per_node < 2:
        return 1
    near, far = 1 / cluster.intra_node.bandwidth, 1 / cluster.inter_node.bandwidth
    direct = top_k * (per_node / ep * near + (1 - per_node / ep) * far)
    by_nodes = expected_nodes(top_k, nodes) * (nodes - 1) / nodes * far + top_k * (per_node - 1) / per_node * near
    return per_node if by_nodes < direct else 1
