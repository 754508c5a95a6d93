"""Two hops: a token crosses to another node once, however many of its experts are there.

[Note: far and near]
Ranks that are `inner` neighbours share a node and its fast links. A row goes

    far    to the rank of the same place in each node that has an expert of its token, with the numbers and weights of
           the token's experts
    near   inside the node, to the ranks of those experts, one row for each; what they make of it comes back near

and what a node made of a token is added up there, so that one row for each node goes home. Seen from far, nodes are
experts of a mixture; inside a node, arrived rows are the tokens of another one. With k experts on n nodes picked
without aim a token crosses n·(1 - (1 - 1/n)^k) times instead of k·(n - 1)/n; gates that limit the groups of a token
(DeepSeek's) limit its nodes.
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
    """A rank's way over nodes."""

    def __init__(self, inter_node: MeshAxis, intra_node: MeshAxis, *, etp: int, experts: int):
        self.inter_node, self.intra_node, self.etp = inter_node, intra_node, etp
        self.num_nodes, self.node_size = inter_node.size, intra_node.size
        self.experts_per_node = experts // self.num_nodes
        """experts of a node"""

    def sort_by_node(self, routing: Routing) -> TokenPermutation:
        """Assignments by node; where they are listed by token, a node once for each."""
        nodes = routing.experts // self.experts_per_node  # a dropped one's number gives the number of nodes
        if routing.choices_per_token:
            each = nodes.view(-1, routing.choices_per_token)
            again = (each.unsqueeze(2) == each.unsqueeze(1)).tril(-1).any(2)
            nodes = each.masked_fill(again, self.num_nodes).flatten()
        return TokenPermutation.from_experts(
            nodes,
            self.num_nodes,
            routing.tokens,
            num_tokens=routing.num_tokens,
            choices_per_token=routing.choices_per_token,
        )

    def token_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's far and near legs, from every rank's counts of [experts + nodes]."""
        experts = self.experts_per_node * self.num_nodes
        by_place = counts.view(self.num_nodes, self.node_size, -1)
        far = by_place[:, self.intra_node.index, experts:]
        first = self.inter_node.index * self.experts_per_node
        near = by_place[:, :, first : first + self.experts_per_node].sum(0)
        return far.contiguous(), near.contiguous()

    def max_received(self, counts: Tensor) -> int:
        """Rows that arrive at the fullest rank, far or near."""
        experts = self.experts_per_node * self.num_nodes
        far = counts[:, experts:].view(self.num_nodes, self.node_size, self.num_nodes).sum(0).max()
        parts = self.num_nodes * self.node_size // self.etp
        near = counts[:, :experts].sum(0).view(parts, -1).sum(1).max()
        return int(max(far, near))

    def start(
        self, experts: Experts, x: Tensor, routing: Routing, by_node: TokenPermutation, counts: Tensor
    ) -> Callable[[], Tensor]:
        """Sends tokens [tokens, width] on their way; who asks gets the sum of what their experts made of them."""
        far_table, near_table = self.token_counts(counts)
        by_node = by_node.truncate(int(far_table[self.inter_node.index].sum()))
        crossing = by_node.permute(x)
        far = TokenAllToAll(self.inter_node, far_table, len(crossing), x.device)
        arriving = far.start_dispatch(crossing)
        k = max(routing.choices_per_token, 1)
        which = (by_node.tokens if routing.choices_per_token else by_node.order)[: by_node.num_sent]

        def of_each(values: Tensor) -> Tensor:
            return values.view(-1, k).index_select(0, which)

        weighing = far.start_dispatch(of_each(routing.weights))
        numbers = far.dispatch(of_each(routing.experts)).flatten() - self.inter_node.index * self.experts_per_node
        keys = None if routing.dropout_keys is None else far.dispatch(of_each(routing.dropout_keys)).flatten()

        def finish() -> Tensor:
            rows, weights = arriving(), weighing().flatten()
            inside = (numbers >= 0) & (numbers < self.experts_per_node)
            order = TokenPermutation.from_experts(
                torch.where(inside, numbers, self.experts_per_node),
                self.experts_per_node,
                torch.arange(len(rows), device=rows.device).repeat_interleave(k),
                num_tokens=len(rows),
                choices_per_token=k,
                dropout_keys=keys,
            ).truncate(int(near_table[self.intra_node.index].sum()))
            handed = order.permute(rows)
            near = TokenAllToAll(self.intra_node, near_table, len(handed), x.device, etp=self.etp)
            arrived = near.start_dispatch(handed)()
            own = None if order.dropout_keys is None else near.dispatch(order.dropout_keys)
            made = near.start_combine(experts(arrived, near.expert_ends, own))()
            home = far.start_combine(order.unpermute(made, torch.where(inside, weights, 0)))()
            return by_node.sum_per_token(home)

        return finish
