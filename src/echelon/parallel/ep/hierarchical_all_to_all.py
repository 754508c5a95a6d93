"""`HierarchicalAllToAll`: a token crosses to another node once, however many of its experts are there.

[Note: inter-node and intra-node]
`node_size` neighbouring ranks share a node and its fast links. A token goes

    inter-node   to the rank of the same index in each node that has an expert of the token, with the numbers and
                 weights of the token's experts
    intra-node   to the ranks of those experts, once for each; their outputs come back the same way

A node sums its experts' outputs of a token, so that one row per node comes back. Between nodes, nodes act as the
experts; inside a node, the arrived tokens are routed again. With top-k experts on n nodes chosen at random a token
crosses n·(1 - (1 - 1/n)^k) times instead of k·(n - 1)/n; gates that limit the groups of a token (DeepSeek's) limit its
nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.moe.experts import Experts
from echelon.moe.routing import Routing
from echelon.moe.token_permutation import TokenPermutation
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.ep.token_all_to_all import TokenAllToAll


class HierarchicalAllToAll:
    """One rank's two-level dispatch."""

    def __init__(self, inter_node: MeshAxis, intra_node: MeshAxis, *, etp: int, experts: int):
        self.inter_node, self.intra_node, self.etp = inter_node, intra_node, etp
        self.num_nodes, self.node_size = inter_node.size, intra_node.size
        self.experts_per_node = experts // self.num_nodes

    def sort_by_node(self, routing: Routing) -> TokenPermutation:
        """Sort assignments by node; a token that lists several experts of a node goes there once."""
        nodes = routing.experts // self.experts_per_node  # a dropped assignment gives num_nodes
        if routing.choices_per_token:
            choices = nodes.view(-1, routing.choices_per_token)
            repeats = (choices.unsqueeze(2) == choices.unsqueeze(1)).tril(-1).any(2)
            nodes = choices.masked_fill(repeats, self.num_nodes).flatten()
        return TokenPermutation.from_experts(
            nodes,
            self.num_nodes,
            routing.tokens,
            num_tokens=routing.num_tokens,
            choices_per_token=routing.choices_per_token,
        )

    def token_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's inter-node and intra-node token counts, from all ranks' [experts + nodes]."""
        experts = self.experts_per_node * self.num_nodes
        by_place = counts.view(self.num_nodes, self.node_size, -1)
        far = by_place[:, self.intra_node.index, experts:]
        first = self.inter_node.index * self.experts_per_node
        near = by_place[:, :, first : first + self.experts_per_node].sum(0)
        return far.contiguous(), near.contiguous()

    def max_received(self, counts: Tensor) -> int:
        """Return the tokens that the fullest rank receives in one of the exchanges."""
        experts = self.experts_per_node * self.num_nodes
        far = counts[:, experts:].view(self.num_nodes, self.node_size, self.num_nodes).sum(0).max()
        parts = self.num_nodes * self.node_size // self.etp
        near = counts[:, :experts].sum(0).view(parts, -1).sum(1).max()
        return int(max(far, near))

    def start(
        self, experts: Experts, x: Tensor, routing: Routing, by_node: TokenPermutation, counts: Tensor
    ) -> Callable[[], Tensor]:
        """Launch the dispatch of tokens [tokens, width]; the returned function gives their experts' weighted sums."""
        inter_counts, intra_counts = self.token_counts(counts)
        by_node = by_node.truncate(int(inter_counts[self.inter_node.index].sum()))
        crossing_tokens = by_node.permute(x)
        inter = TokenAllToAll(self.inter_node, inter_counts, len(crossing_tokens), x.device)
        arriving = inter.start_dispatch(crossing_tokens)
        k = max(routing.choices_per_token, 1)
        sources = (by_node.tokens if routing.choices_per_token else by_node.order)[: by_node.num_sent]

        def per_token(values: Tensor) -> Tensor:
            return values.view(-1, k).index_select(0, sources)

        weights_arriving = inter.start_dispatch(per_token(routing.weights))
        first_expert = self.inter_node.index * self.experts_per_node
        expert_ids = inter.dispatch(per_token(routing.experts)).flatten() - first_expert
        keys = None if routing.dropout_keys is None else inter.dispatch(per_token(routing.dropout_keys)).flatten()

        def finish() -> Tensor:
            rows, weights = arriving(), weights_arriving().flatten()
            is_local = (expert_ids >= 0) & (expert_ids < self.experts_per_node)
            order = TokenPermutation.from_experts(
                torch.where(is_local, expert_ids, self.experts_per_node),
                self.experts_per_node,
                torch.arange(len(rows), device=rows.device).repeat_interleave(k),
                num_tokens=len(rows),
                choices_per_token=k,
                dropout_keys=keys,
            ).truncate(int(intra_counts[self.intra_node.index].sum()))
            permuted = order.permute(rows)
            intra = TokenAllToAll(self.intra_node, intra_counts, len(permuted), x.device, etp=self.etp)
            arrived = intra.start_dispatch(permuted)()
            local_keys = None if order.dropout_keys is None else intra.dispatch(order.dropout_keys)
            expert_output = intra.start_combine(experts(arrived, intra.expert_ends, local_keys))()
            outputs = inter.start_combine(order.unpermute(expert_output, torch.where(is_local, weights, 0)))()
            return by_node.sum_per_token(outputs)

        return finish
