"""What expert parallelism costs: every collective of an MoE layer, from the sizes of what is routed. No torch.

The gate decides how many tokens go where. The all-to-alls counted here are those of a balanced load: over all ranks
together that is exact, since one rank receives what another does not.

    counts         all-gathered, per expert (and per node) and of tokens, so that all ranks know all
    tokens         dispatched and combined, and their gradients the same way
    scores         of full sequences, all-gathered over tp and cp; their gradients are summed over cp
    hierarchical   inter-node: a row per node of a token, with its experts' numbers and weights; intra-node: per expert
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.parallel.cp.cost import tokens_per_rank

EP_ETP_AXIS = "ep*etp"
"""the ranks that hold all experts together"""
MAX_LOAD_FACTOR = 2.0
"""expert tokens that a rank holds at a time, at most, relative to a balanced load: see chunked_dispatch.py"""

INT64_BYTES = 8
"""bytes of a count, of an expert's number, and of a dropout key"""


@dataclass(frozen=True, kw_only=True)
class MoeTraffic:
    """Sizes of the tokens that a rank's MoE layers route in a microbatch."""

    layers: int
    sequences: int
    seq_len: int
    """of full sequences"""
    width: int
    element_bytes: int
    experts: int
    top_k: float
    """experts that process a token: fewer if some assignments are dropped"""
    score_bytes: int
    """bytes of one score or weight: 4, or 8 under float64"""
    scores: int = 0
    """scores per token; 0: as many as experts"""
    dropout: bool = False
    """dropout inside the experts"""
    recomputes_combine: bool = False
    """dropout or another recomputed layer follows: recomputation then repeats the combine too"""
    nodes_per_token: float = 0.0
    """nodes that a token goes to in a hierarchical all-to-all; 0: as expected of k experts chosen at random"""

    def tokens_per_rank(self, layout: Layout) -> float:
        """Return the tokens of a rank, without padding."""
        return self.sequences * self.seq_len / (layout.cp * layout.tp)


def expected_nodes(k: float, nodes: int) -> float:
    """Return how many of the nodes hold k experts chosen at random."""
    return float(nodes * (1 - (1 - 1 / nodes) ** k))


def collectives(layout: Layout, traffic: MoeTraffic, *, recomputed: bool | None = None) -> Iterator[Collective]:
    """Yield the collectives of a step on one rank, without chunks. `recomputed` overrides the layout's `recompute`."""
    if recomputed is None:
        recomputed = layout.recompute.partition(":")[0] in ("full", "every", "sqrt")
    passes = 2 if recomputed else 1  # forward ones
    for item, times in (*_score_collectives(layout, traffic, passes), *_token_collectives(layout, traffic, passes)):
        yield replace(item, count=item.count * times * traffic.layers * layout.accumulate)


RepeatedCollectives = Iterator[tuple[Collective, int]]
"""collectives of one layer and microbatch, and how often each is issued"""


def _score_collectives(layout: Layout, routed: MoeTraffic, passes: int) -> RepeatedCollectives:
    each = (routed.scores or routed.experts) * routed.score_bytes * routed.sequences
    here = -(-tokens_per_rank(layout, routed.seq_len) // layout.tp)
    for axis, ranks in (("tp", layout.tp), ("cp", layout.cp * layout.tp)):
        if getattr(layout, axis) > 1:
            yield Collective(op="all_gather", axis=axis, bytes=ranks * here * each, purpose="scores"), passes
    if layout.cp > 1:
        yield Collective(op="all_reduce", axis="cp", bytes=routed.seq_len * each, purpose="scores"), 1


def _token_collectives(layout: Layout, routed: MoeTraffic, passes: int) -> RepeatedCollectives:
    ranks, tokens = layout.ep * layout.etp, routed.tokens_per_rank(layout)
    if ranks == 1:
        return
    nodes = ranks // layout.ep_inner if layout.ep_inner > 1 else 0
    counts = ranks * (routed.experts + nodes + 1) * INT64_BYTES
    yield Collective(op="all_gather", axis=EP_ETP_AXIS, bytes=counts, purpose="counts"), passes
    row = routed.width * routed.element_bytes
    near = f"{EP_ETP_AXIS}/{layout.ep_inner}" if nodes else EP_ETP_AXIS
    if nodes:
        far = f"{EP_ETP_AXIS}%{layout.ep_inner}"
        crossing = tokens * (routed.nodes_per_token or expected_nodes(routed.top_k, nodes))
        each = max(1, round(routed.top_k))
        returns = passes if routed.recomputes_combine else 1
        yield _all_to_all(far, crossing * row, "tokens"), passes + returns + 2
        yield _all_to_all(far, crossing * each * routed.score_bytes, "weights"), passes + 1
        yield _all_to_all(far, crossing * each * INT64_BYTES, "numbers"), passes * (1 + routed.dropout)
    sent = tokens * routed.top_k * layout.etp
    yield _all_to_all(near, sent * row, "tokens"), 2 * (passes + 1)
    if routed.dropout:
        yield _all_to_all(near, sent * INT64_BYTES, "keys"), passes


def _all_to_all(axis: str, size: float, part: str) -> Collective:
    return Collective(op="all_to_all", axis=axis, bytes=round(size), purpose=part)
