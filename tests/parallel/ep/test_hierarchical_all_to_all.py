"""Two hops: which nodes a token crosses to, and what the tables of both legs say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.moe.routing import token_choice_routing
from echelon.moe.token_permutation import TokenPermutation
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.ep.hierarchical_all_to_all import HierarchicalAllToAll

NODES, INNER, EXPERTS, K = 3, 2, 12, 4


def hops(rank: int) -> HierarchicalAllToAll:
    far = MeshAxis("far", [place * INNER + rank % INNER for place in range(NODES)], rank, None, frozenset())
    near = MeshAxis("near", [rank // INNER * INNER + place for place in range(INNER)], rank, None, frozenset())
    return HierarchicalAllToAll(far, near, etp=1, experts=EXPERTS)


def choices(rank: int) -> torch.Tensor:
    """[1, tokens, K], some of them not made."""
    made = torch.Generator().manual_seed(rank)
    chosen = torch.rand(1, 9, EXPERTS, generator=made).topk(K, -1).indices
    return torch.where(torch.rand(1, 9, K, generator=made) < 0.2, EXPERTS, chosen)


def choices_of_one_node(rank: int) -> torch.Tensor:
    """All tokens go to the first node, where both ranks have experts; only the first rank of each node has tokens."""
    chosen = torch.full((1, 9, K), EXPERTS)
    if rank % INNER == 0:
        chosen[0, :, 0] = torch.arange(9) % (EXPERTS // NODES)
    return chosen


def test_a_token_crosses_to_a_node_once() -> None:
    experts = choices(0)
    routing = token_choice_routing(experts, torch.ones(experts.shape), torch.zeros(1), EXPERTS)
    found = hops(0).sort_by_node(routing)
    pairs = {(token, node) for token, each in enumerate((experts[0] // 4).tolist()) for node in each if node < NODES}
    used = int(found.counts.sum())
    rows = [(token, node) for node, count in enumerate(found.counts.tolist()) for token in [node] * count]
    listed = list(zip(found.tokens[:used].tolist(), [node for _, node in rows], strict=True))
    assert len(listed) == len(set(listed)) == len(pairs)
    assert set(listed) == pairs


@pytest.mark.parametrize("chosen", [choices, choices_of_one_node])
def test_token_counts_follow_from_all_ranks_counts(chosen: Callable[[int], torch.Tensor]) -> None:
    """What a rank hands on inside its node is what all ranks of its place sent there."""
    counts, to_nodes = [], []
    for rank in range(NODES * INNER):
        routing = token_choice_routing(chosen(rank), torch.ones(1, 9, K), torch.zeros(1), EXPERTS)
        counts.append(TokenPermutation.from_routing(routing).counts)
        to_nodes.append(hops(rank).sort_by_node(routing).counts)
    census = torch.stack([torch.cat(both) for both in zip(counts, to_nodes, strict=True)])
    fullest = 0
    for rank in range(NODES * INNER):
        far, near = hops(rank).token_counts(census)
        node, place = divmod(rank, INNER)
        assert far.tolist() == [to_nodes[sender * INNER + place].tolist() for sender in range(NODES)]
        for other in range(INNER):
            arrived = sum(counts[sender * INNER + other][node * 4 : node * 4 + 4] for sender in range(NODES))
            assert near[other].tolist() == arrived.tolist()
        fullest = max(fullest, int(far[:, node].sum()), int(near[:, place * 2 : place * 2 + 2].sum()))
    assert hops(0).max_received(census) == fullest
