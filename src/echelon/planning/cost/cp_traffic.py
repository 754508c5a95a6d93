"""Context parallelism as the planner counts it: bytes per link, memory traffic, saved and working memory.

parallel/cp/cost.py lists the collectives. In the mesh tp is innermost, then the ranks that exchange heads, then the
ring. So a node has `per_node / tp` ranks of a cp group.

[Note: links]

    send                          from each rank of a ring to the next: as fast as the slowest hop, which is between
                                  nodes unless the ring fits one
    all-to-all                    the part for ranks of the same node stays there, the rest leaves by the rank's link
    all-gather, reduce-scatter    all bytes pass the links inside a node, and leave it over the links of all its ranks

[Note: memory traffic]

Counted from what ring_attention.py, all_gather_attention.py, ulysses.py and kernels/attention/blockwise_attention.py
read and write on the busiest rank, for which the others wait. Each block writes its partial result for the same queries
or keys; merging reads them once. If more results are pending than MAX_PENDING_BYTES and MAX_PENDING allow, merging also
reads and writes their float32 sum in between.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from echelon.kernels.memory_limits import MAX_PENDING, MAX_PENDING_BYTES
from echelon.layout.collective import Collective
from echelon.layout.rules import head_parallel_size
from echelon.parallel.cp import cost as cp_cost
from echelon.planning.cluster.link_time import collective_bytes
from echelon.planning.cost.step_work import CpTraffic
from echelon.planning.model.model_shape import AttentionShape
from echelon.planning.scenario import Scenario

FP32_BYTES = 4


def cp_traffic(scenario: Scenario) -> CpTraffic:
    """Count the cp transfers of one microbatch through all layers, on one rank."""
    layout, shape = scenario.layout, scenario.shape
    attention, num_layers = shape.attention, shape.num_layers - shape.num_gathered_layers
    if layout.cp == 1:
        return CpTraffic()
    gathered = [_link_bytes(scenario, item) for item in gathered_collectives(scenario)]
    if attention is None or not num_layers:
        return CpTraffic(
            intra_node_bytes=sum(intra_node for intra_node, _ in gathered),
            inter_node_bytes=sum(inter_node for _, inter_node in gathered),
            num_collectives=sum(item.count for item in gathered_collectives(scenario)),
        )
    collectives = cp_collectives(scenario, attention)
    # A rank sends gradients of all keys that it attended to, or of half: in every step some rank sends those of all.
    sends = {"keys and values": 0.0, "their gradients": 0.0}
    for item in collectives:
        if item.op == "send":
            sends[item.purpose] = max(sends[item.purpose], float(item.bytes * num_layers))
    others = [item for item in collectives if item.op != "send"]
    links = [*gathered, *(_link_bytes(scenario, item) for item in others)]
    others += gathered_collectives(scenario)
    forward, backward = _memory_traffic(scenario, attention)
    token_layers = _attention_tokens(scenario) * num_layers
    return CpTraffic(
        ring_steps=1 if layout.cp_kind == "gather" else layout.cp // layout.ulysses,
        ring_bytes=sends["keys and values"],
        ring_grad_bytes=sends["their gradients"],
        ring_in_node=layout.tp * layout.cp <= scenario.cluster.per_node,
        intra_node_bytes=sum(intra_node for intra_node, _ in links),
        inter_node_bytes=sum(inter_node for _, inter_node in links),
        num_collectives=sum(item.count for item in others),
        is_blockwise=layout.ulysses < layout.cp,
        memory_bytes=token_layers * forward,
        memory_bytes_backward=token_layers * backward,
    )


def cp_collectives(scenario: Scenario, attention: AttentionShape) -> list[Collective]:
    """List the collectives of one microbatch over cp, by the strategy's cost function."""
    return list(
        cp_cost.collectives(
            replace(scenario.layout, accumulate=1),
            attention_widths(scenario, attention),
            layers=scenario.shape.num_layers - scenario.shape.num_gathered_layers,
            batch=-(-scenario.layout.microbatch // _grid_batch_split(scenario)),
            seq_len=scenario.seq_len,
            element_bytes=scenario.element_bytes,
        )
    )


def gathered_collectives(scenario: Scenario) -> list[Collective]:
    """List the collectives of one microbatch for modules that get full sequences."""
    return list(
        cp_cost.gathered_collectives(
            replace(scenario.layout, accumulate=1),
            modules=scenario.shape.num_gathered_modules,
            batch=scenario.layout.microbatch,
            seq_len=scenario.seq_len,
            width=scenario.shape.width,
            element_bytes=scenario.element_bytes,
        )
    )


def cp_bytes_per_token(scenario: Scenario) -> float:
    """Bytes that a rank sends per token and layer, in forward and backward."""
    attention = scenario.shape.attention
    token_layers = _attention_tokens(scenario) * scenario.shape.num_layers
    collectives = gathered_collectives(scenario)
    collectives += cp_collectives(scenario, attention) if attention is not None else []
    return sum(collective_bytes(item, _group_size(scenario, item)) for item in collectives) / token_layers


def computed_attention(scenario: Scenario, attention: AttentionShape) -> AttentionShape:
    """Attention as cp computes it: values that travel with keys are padded to their width."""
    return replace(attention, value_dim=attention.head_dim) if scenario.layout.cp > 1 else attention


def attention_widths(scenario: Scenario, attention: AttentionShape) -> cp_cost.AttentionWidths:
    dims = {name: getattr(attention, name) for name in ("heads", "kv_heads", "head_dim", "value_dim")}
    return cp_cost.AttentionWidths.per_rank(head_parallel_size(scenario.layout) or 1, **dims)


def _link_bytes(scenario: Scenario, item: Collective) -> tuple[float, float]:
    """Return a rank's bytes (inside its node, between nodes). See [Note: links]."""
    ranks = _group_size(scenario, item)
    ranks_per_node = max(1, min(ranks, scenario.cluster.per_node // scenario.layout.tp))
    wire = collective_bytes(item, ranks)
    if ranks_per_node == ranks:
        return wire, 0.0
    if item.op == "all_to_all":
        leaving = item.count * item.bytes * (ranks - ranks_per_node) / ranks
        return wire - leaving, leaving
    return wire, wire / ranks_per_node


def _group_size(scenario: Scenario, item: Collective) -> int:
    return scenario.layout.ulysses if item.axis == "ulysses" else scenario.layout.cp


def _grid_batch_split(scenario: Scenario) -> int:
    """Ranks of a tp grid that have the same heads, of other sequences."""
    return scenario.layout.tp // (head_parallel_size(scenario.layout) or 1)


def _attention_tokens(scenario: Scenario) -> float:
    """Tokens whose attention a rank computes."""
    return scenario.tokens / _grid_batch_split(scenario)


def _token_elements(scenario: Scenario, attention: AttentionShape) -> tuple[int, int]:
    """Elements per token on one rank inside attention: of queries, or of a block's result; of keys and values."""
    widths = attention_widths(scenario, attention)
    copies = lcm(scenario.layout.ulysses, widths.kv_heads) // widths.kv_heads
    return widths.queries, widths.keys_and_values * copies


def _memory_traffic(scenario: Scenario, attention: AttentionShape) -> tuple[float, float]:
    """Bytes per token and layer, (forward, backward), besides attention's. See [Note: memory traffic]."""
    layout, (q, kv) = scenario.layout, _token_elements(scenario, attention)
    size, steps = scenario.element_bytes, layout.cp // layout.ulysses
    forward = backward = 0.0
    if layout.ulysses > 1:
        # Heads are packed and reordered before and after the exchange; so is the output.
        forward = backward = 6 * size * (q + kv) + 4 * size * attention_widths(scenario, attention).results
    if steps == 1:
        return forward, backward
    blocks = 2 if layout.cp_kind == "gather" else steps
    # Results of all blocks; in backward the gradients of their queries.
    forward += 2 * size * kv + q * _merge_bytes(scenario, blocks, q)
    backward += q * _merge_bytes(scenario, blocks, q)
    if layout.cp_kind == "gather":
        # Keys and values of all ranks are reordered after the gather, their gradients before the reduce-scatter.
        forward += 4 * size * layout.cp * kv
        backward += kv * (
            layout.cp * (4 * size + 5 * FP32_BYTES) + (layout.cp + 0.5) * (2 * FP32_BYTES + size) + FP32_BYTES + size
        )
    else:
        # Gradients that are sent home, and those that arrive.
        backward += kv * (2 * size * steps + _merge_bytes(scenario, steps, kv // 2))
    return forward, backward


def _merge_bytes(scenario: Scenario, num_blocks: int, elements: int) -> float:
    """Bytes per element moved to merge `num_blocks` results with this many elements per token."""
    partial_sums = -(-num_blocks // _max_pending_blocks(scenario, elements)) - 1
    return (num_blocks + 1) * scenario.element_bytes + partial_sums * 2 * FP32_BYTES


def _max_pending_blocks(scenario: Scenario, elements: int) -> int:
    """Results with this many elements per token that may wait to be merged."""
    if not scenario.is_own:  # they add each result as it comes
        return 1
    block_bytes = _attention_tokens(scenario) * scenario.element_bytes * elements
    return max(1, min(MAX_PENDING, int(MAX_PENDING_BYTES / block_bytes)))


def saved_cp_bytes(scenario: Scenario) -> float:
    """Bytes of a layer and microbatch that cp saves for backward, besides what attention saves without cp.

    Keys and values that travel are a copy of the projection's output; an exchanged output is a copy of attention's.
    """
    attention, layout = scenario.shape.attention, scenario.layout
    if layout.cp == 1 or attention is None or not scenario.has_kernels:
        return 0.0
    q, kv = _token_elements(scenario, attention)
    elements = kv if layout.ulysses < layout.cp else 0
    if layout.ulysses > 1:
        elements += q + kv - attention_widths(scenario, attention).keys_and_values
    return _attention_tokens(scenario) * scenario.element_bytes * elements


def cp_working_bytes(scenario: Scenario) -> float:
    """Bytes that a layer's attention backward needs for cp while it runs.

    ring       the current slice and the one that arrives, gradients that are sent and received, and pending ones
    gather     keys and values of all ranks, and their gradients in float32: summed, reordered, and as sent
    ulysses    queries, keys and values as sent, as received, and reordered

    With ring and gather, gradients of queries wait to be merged.
    """
    attention = scenario.shape.attention
    if scenario.layout.cp == 1 or attention is None:
        return 0.0
    layout, size, (q, kv) = scenario.layout, scenario.element_bytes, _token_elements(scenario, attention)
    tokens, steps = _attention_tokens(scenario), layout.cp // layout.ulysses
    exchanged = 3.0 * size * (q + kv) if layout.ulysses > 1 else 0.0
    if steps == 1:
        return tokens * exchanged
    if layout.cp_kind == "gather":
        gathered = layout.cp * (size + 3 * FP32_BYTES) * kv
        return tokens * (_pending_bytes(scenario, 2, q) * q + gathered)
    slices = (4 * size + _pending_bytes(scenario, steps, kv // 2)) * kv
    return tokens * max(exchanged, _pending_bytes(scenario, steps, q) * q + slices)


def _pending_bytes(scenario: Scenario, num_blocks: int, elements: int) -> float:
    """Bytes per element of results that wait to be merged, and of their partial sum."""
    limit = _max_pending_blocks(scenario, elements)
    return min(num_blocks, limit) * scenario.element_bytes + (FP32_BYTES if num_blocks > limit else 0)
