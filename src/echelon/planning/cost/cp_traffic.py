"""Context parallelism as planning counts it: what passes which links, what hides, what is moved and held beside that.

parallel/cp/cost.py says which messages there are. In the mesh tp is innermost, then the ranks that exchange heads, then
the ring; so of a group of cp ranks a node has `per_node / tp`, and a message stays inside a node or does not.

[Note: links]

    send               from each rank of a ring to the next: as fast as its slowest hop, which is between nodes where
                       the ring is not inside one
    all-to-all         what is for ranks of the same node stays there, the rest leaves it, each rank's by its own link
    gather, scatter    everything passes the links inside a node, and comes in and out over those of all its ranks

[Note: moved]

Counted from what ring.py, gather.py, ulysses.py and kernels/attention/blockwise_attention.py read and write, of the rank that has the most to
do, for the others wait for it. What blocks give for the same queries or keys is written by each and read once, when it
is brought together; where that is more than may wait (HELD, MOST), its sum in 32 bits is read and written in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from echelon.layout.collective import Collective
from echelon.layout.rules import head_parallel_size
from echelon.parallel.cp import cost as cp_cost
from echelon.planning.cluster.link_time import wire_bytes
from echelon.planning.cost.step_work import CpTraffic
from echelon.planning.model.model_shape import AttentionShape
from echelon.planning.scenario import Scenario

FP32_BYTES = 4
"""bytes of an element that is added up"""
MERGE_BUFFER_BYTES, MAX_PENDING_BLOCKS = 512 << 20, 8
"""bytes of results that wait to be brought together, and how many of them (as kernels/attention/blockwise_attention.py has it, which loads
torch)"""


def cp_traffic(scenario: Scenario) -> CpTraffic:
    attention = model_attention(scenario)
    if scenario.layout.cp == 1 or attention is None:
        return CpTraffic()
    layout, found = scenario.layout, cp_collectives(scenario, attention)
    # Ranks send gradients of all keys that they have seen or of half: some rank in every step those of all.
    sends = {"keys and values": 0.0, "their gradients": 0.0}
    for item in found:
        if item.op == "send":
            sends[item.purpose] = max(sends[item.purpose], float(item.bytes * scenario.shape.num_layers))
    together = [item for item in found if item.op != "send"]
    links = [_link_bytes(scenario, item) for item in together]
    forward, backward = _memory_traffic(scenario, attention)
    every = _attention_tokens(scenario) * scenario.shape.num_layers
    return CpTraffic(
        ring_steps=1 if layout.cp_kind == "gather" else layout.cp // layout.ulysses,
        ring_bytes=sends["keys and values"],
        ring_grad_bytes=sends["their gradients"],
        ring_in_node=layout.tp * layout.cp <= scenario.cluster.per_node,
        intra_node_bytes=sum(near for near, _ in links),
        inter_node_bytes=sum(far for _, far in links),
        num_collectives=sum(item.count for item in together),
        is_blockwise=layout.ulysses < layout.cp,
        memory_bytes=every * forward,
        memory_bytes_backward=every * backward,
    )


def cp_collectives(scenario: Scenario, attention: AttentionShape) -> list[Collective]:
    """What one microbatch issues over cp, by the strategy's own cost function."""
    return list(
        cp_cost.collectives(
            replace(scenario.layout, accumulate=1),
            attention_widths(scenario, attention),
            layers=scenario.shape.num_layers,
            batch=-(-scenario.layout.microbatch // _grid_batch_split(scenario)),
            seq_len=scenario.seq_len,
            element_bytes=scenario.element_bytes,
        )
    )


def cp_bytes_per_token(scenario: Scenario) -> float:
    """By a rank, for each of its tokens and each layer, there and back."""
    attention = model_attention(scenario)
    if attention is None:
        return 0.0
    every = _attention_tokens(scenario) * scenario.shape.num_layers
    found = cp_collectives(scenario, attention)
    return sum(item.count * wire_bytes(item.op, item.bytes, _group_size(scenario, item)) for item in found) / every


def _group_size(scenario: Scenario, item: Collective) -> int:
    return scenario.layout.ulysses if item.axis == "ulysses" else scenario.layout.cp


def _grid_batch_split(scenario: Scenario) -> int:
    """Ranks of tp that have the same heads, of other sequences: on a grid."""
    return scenario.layout.tp // (head_parallel_size(scenario.layout) or 1)


def _attention_tokens(scenario: Scenario) -> float:
    """Whose attention a rank works on."""
    return scenario.tokens / _grid_batch_split(scenario)


def model_attention(scenario: Scenario) -> AttentionShape | None:
    return scenario.shape.attention


def computed_attention(scenario: Scenario, attention: AttentionShape) -> AttentionShape:
    """As it is computed: values that travel with keys are as wide as these."""
    return replace(attention, value_dim=attention.head_dim) if scenario.layout.cp > 1 else attention


def attention_widths(scenario: Scenario, attention: AttentionShape) -> cp_cost.AttentionWidths:
    return cp_cost.AttentionWidths.per_rank(
        head_parallel_size(scenario.layout) or 1,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
    )


def _link_bytes(scenario: Scenario, item: Collective) -> tuple[float, float]:
    """Bytes of a rank (inside its node, between nodes). See [Note: links]."""
    layout, ranks = scenario.layout, _group_size(scenario, item)
    members = max(1, min(ranks, scenario.cluster.per_node // layout.tp))
    wire = item.count * wire_bytes(item.op, item.bytes, ranks)
    if members == ranks:
        return wire, 0.0
    if item.op == "all_to_all":
        far = item.count * item.bytes * (ranks - members) / ranks
        return wire - far, far
    return wire, wire / members


# -- through memory and in it -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _TokenElements:
    """Of a token on one rank: bytes of a number, elements of queries, and of keys and values where attention is.

    Values are as wide as keys there, and so is what blocks give; `out` are the elements of the result.
    """

    element_bytes: int
    q: int
    kv: int
    out: int

    @classmethod
    def from_scenario(cls, scenario: Scenario, attention: AttentionShape) -> _TokenElements:
        widths, ulysses = attention_widths(scenario, attention), scenario.layout.ulysses
        copies = lcm(ulysses, widths.kv_heads) // widths.kv_heads
        return cls(
            element_bytes=scenario.element_bytes,
            q=widths.queries,
            kv=widths.keys_and_values * copies,
            out=widths.results,
        )


def _memory_traffic(scenario: Scenario, attention: AttentionShape) -> tuple[float, float]:
    """Bytes per token and layer, forward and backward, beside what attention itself does. See [Note: moved]."""
    layout, x = scenario.layout, _TokenElements.from_scenario(scenario, attention)
    size, steps = x.element_bytes, layout.cp // layout.ulysses
    forward = backward = 0.0
    if layout.ulysses > 1:
        # Heads put together, put in order, and again when they have arrived; the result there and back.
        forward = backward = 6 * size * (x.q + x.kv) + 4 * size * x.out
    if steps == 1:
        return forward, backward
    blocks = 2 if layout.cp_kind == "gather" else steps
    # The result of every block, and in backward the gradient of its queries.
    forward += 2 * size * x.kv + x.q * _merge_bytes(scenario, blocks, x.q)
    backward += x.q * _merge_bytes(scenario, blocks, x.q)
    if layout.cp_kind == "gather":
        # Everyone's keys and values are put in order when they have arrived, their gradients before they leave.
        forward += 4 * size * layout.cp * x.kv
        backward += x.kv * (
            layout.cp * (4 * size + 5 * FP32_BYTES) + (layout.cp + 0.5) * (2 * FP32_BYTES + size) + FP32_BYTES + size
        )
    else:
        # Gradients that go home, and those that come.
        backward += x.kv * (2 * size * steps + _merge_bytes(scenario, steps, x.kv // 2))
    return forward, backward


def _merge_bytes(scenario: Scenario, num_blocks: int, elements: int) -> float:
    """Bytes to bring parts together, for each of so many elements of a token."""
    in_between = -(-num_blocks // _pending_blocks(scenario, elements)) - 1
    return (num_blocks + 1) * scenario.element_bytes + in_between * 2 * FP32_BYTES


def _pending_blocks(scenario: Scenario, elements: int) -> int:
    """Parts of so many elements of a token that may wait to be brought together."""
    if scenario.program == "others":  # they add each part as it comes
        return 1
    return max(
        1,
        min(
            MAX_PENDING_BLOCKS,
            int(MERGE_BUFFER_BYTES / (_attention_tokens(scenario) * scenario.element_bytes * elements)),
        ),
    )


def saved_cp_bytes(scenario: Scenario) -> float:
    """Bytes of a layer and microbatch that backward needs beside what attention on whole sequences keeps.

    Keys and values that travel are a copy of those in the product that made them; a result that was exchanged is one of
    that which attention keeps.
    """
    attention = model_attention(scenario)
    if scenario.layout.cp == 1 or attention is None or not scenario.has_kernels:
        return 0.0
    x, ulysses = _TokenElements.from_scenario(scenario, attention), scenario.layout.ulysses
    own = attention_widths(scenario, attention).keys_and_values
    elements = x.kv if ulysses < scenario.layout.cp else 0
    elements += x.q + x.kv - own if ulysses > 1 else 0
    return _attention_tokens(scenario) * x.element_bytes * elements


def cp_working_bytes(scenario: Scenario) -> float:
    """Bytes that come and go while a layer's attention runs backward, beside what attention on whole sequences needs.

    ring       the slice at hand and the one that arrives, gradients that go home and that come, and those that wait
    gather     everyone's keys and values, and their gradients in 32 bits: added up, in order, and as they are sent
    ulysses    queries, keys and values as they are sent, as they arrive, and in order

    Beside the first two, gradients of queries wait to be brought together.
    """
    attention = model_attention(scenario)
    if scenario.layout.cp == 1 or attention is None:
        return 0.0
    layout, x, tokens = scenario.layout, _TokenElements.from_scenario(scenario, attention), _attention_tokens(scenario)
    exchanged = 3.0 * x.element_bytes * (x.q + x.kv) if layout.ulysses > 1 else 0.0
    steps = layout.cp // layout.ulysses
    if steps == 1:
        return tokens * exchanged
    if layout.cp_kind == "gather":
        return tokens * (_pending_bytes(scenario, 2, x.q) * x.q + layout.cp * (x.element_bytes + 3 * FP32_BYTES) * x.kv)
    slices = (4 * x.element_bytes + _pending_bytes(scenario, steps, x.kv // 2)) * x.kv
    return tokens * max(exchanged, _pending_bytes(scenario, steps, x.q) * x.q + slices)


def _pending_bytes(scenario: Scenario, num_blocks: int, elements: int) -> float:
    """Bytes of each element that wait, and of their sum."""
    waiting = _pending_blocks(scenario, elements)
    return min(num_blocks, waiting) * scenario.element_bytes + (FP32_BYTES if num_blocks > waiting else 0)
