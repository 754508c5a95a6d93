"""Token dispatch of expert parallelism: bytes per link, and whether a hierarchical all-to-all pays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echelon.layout.collective import Collective
from echelon.parallel.ep.cost import EP_ETP_AXIS, MAX_LOAD_FACTOR, MoeTraffic, collectives, expected_nodes
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.cluster.link_time import collective_bytes
from echelon.planning.cost.step_work import ExpertTraffic
from echelon.planning.scenario import Scenario

GATE_SCORE_BYTES = 4
TOKEN_EXCHANGE = "all_to_all"
"""the collective of which busier ranks have more"""

LEAF_NODES = 32
"""nodes under a leaf switch, in the usual rail-optimized network: 64 ports, half of them down"""


def expert_traffic(scenario: Scenario) -> ExpertTraffic:
    """Count what passes the links of the busiest rank, in one microbatch through all layers."""
    intra_node = inter_node = beyond_leaf = num_messages = 0.0
    num_collectives, per_node = 0, scenario.cluster.per_node
    load = scenario.expert_load * _recompute_factor(scenario)
    ranks = scenario.layout.ep * scenario.layout.etp
    nodes, inner = ranks / per_node, scenario.layout.ep_inner
    for item, wire, inter_node_share in _link_usage(scenario):
        wire *= load if item.op == TOKEN_EXCHANGE else 1.0
        intra_node, inter_node = intra_node + wire * (1 - inter_node_share), inter_node + wire * inter_node_share
        num_collectives += item.count
        if item.op == TOKEN_EXCHANGE and inter_node_share:
            beyond_leaf += wire * inter_node_share * max(0.0, 1 - LEAF_NODES / nodes)
            num_messages += item.count * ((ranks - per_node) if inner == 1 else ranks // inner - 1)
    return ExpertTraffic(
        intra_node_bytes=intra_node,
        inter_node_bytes=inter_node,
        leaf_bytes=beyond_leaf,
        num_collectives=num_collectives,
        num_messages=num_messages,
        pairs_microbatches=scenario.pairs_microbatches,
    )


def all_to_all_bytes_per_token(scenario: Scenario) -> float:
    """Bytes that token dispatch sends per token and MoE layer, in forward and backward, under an even load."""
    tokens = scenario.tokens / scenario.layout.tp * scenario.shape.num_moe_layers
    return sum(wire for item, wire, _ in _link_usage(scenario) if item.op == TOKEN_EXCHANGE) / max(tokens, 1)


def _link_usage(scenario: Scenario) -> Iterator[tuple[Collective, float, float]]:
    """Yield the collectives of a microbatch, with their bytes on a link and the share of these that leaves a node."""
    layout, per_node = scenario.layout, scenario.cluster.per_node
    ranks, inner = layout.ep * layout.etp, layout.ep_inner
    if not scenario.shape.experts:
        return
    groups = {
        "tp": (layout.tp, 0.0),
        "cp": (layout.cp, _inter_node_share(layout.cp, per_node / layout.tp)),
        EP_ETP_AXIS: (ranks, _inter_node_share(ranks, per_node)),
        f"{EP_ETP_AXIS}/{inner}": (inner, 0.0),
        f"{EP_ETP_AXIS}%{inner}": (ranks // inner, 1.0),
    }
    for item in collectives(replace(layout, accumulate=1), routed_tokens(scenario)):
        group_size, inter_node_share = groups[item.axis]
        yield item, collective_bytes(item, group_size), inter_node_share


def _inter_node_share(ranks: int, in_node: float) -> float:
    """Share of what a rank sends to the others of a group, `in_node` of whose ranks share a node, that leaves it."""
    return max(0.0, (ranks - max(1.0, in_node)) / (ranks - 1)) if ranks > 1 else 0.0


def _recompute_factor(scenario: Scenario) -> float:
    """Chunked dispatch saves nothing (chunked_dispatch.py): backward dispatches the tokens once more."""
    exchanges = 6 if scenario.layout.recompute.partition(":")[0] in ("full", "every", "sqrt") else 4
    return 1 + 1 / exchanges if scenario.expert_load > MAX_LOAD_FACTOR else 1.0


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
    """Choose `ep_inner`: a node's ranks if the hierarchical all-to-all takes less link time per token, else 1."""
    per_node, nodes = cluster.per_node, ep // max(cluster.per_node, 1)
    if nodes < 2 or ep % per_node or per_node < 2:
        return 1
    intra_node, inter_node = 1 / cluster.intra_node.bandwidth, 1 / cluster.inter_node.bandwidth
    direct = top_k * (per_node / ep * intra_node + (1 - per_node / ep) * inter_node)
    first_hop = expected_nodes(top_k, nodes) * (nodes - 1) / nodes * inter_node
    second_hop = top_k * (per_node - 1) / per_node * intra_node
    return per_node if first_hop + second_hop < direct else 1
