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
from echelon.moe.token_permutation import Sorted
from echelon.parallel.comm.mesh_axis import Axis
from echelon.parallel.ep.token_all_to_all import Leg


class Hops:
    """A rank's way over nodes."""

    def __init__(self, far: Axis, near: Axis, *, etp: int, experts: int):
        self.far, self.near, self.etp = far, near, etp
        self.nodes, self.inner = far.size, near.size
        self.here = experts // self.nodes
        """experts of a node"""

    def to_nodes(self, routing: Routing) -> Sorted:
        """Assignments by node; where they are listed by token, a node once for each."""
        nodes = routing.experts // self.here  # a dropped one's number gives the number of nodes
        if routing.per_token:
            each = nodes.view(-1, routing.per_token)
            again = (each.unsqueeze(2) == each.unsqueeze(1)).tril(-1).any(2)
            nodes = each.masked_fill(again, self.nodes).flatten()
        return Sorted.by(nodes, self.nodes, routing.tokens, num_tokens=routing.num_tokens, per_token=routing.per_token)

    def tables(self, census: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's far and near legs, from every rank's counts of [experts + nodes]."""
        experts = self.here * self.nodes
        by_place = census.view(self.nodes, self.inner, -1)
        far = by_place[:, self.near.index, experts:]
        first = self.far.index * self.here
        near = by_place[:, :, first : first + self.here].sum(0)
        return far.contiguous(), near.contiguous()

    def most(self, census: Tensor) -> int:
        """Rows that arrive at the fullest rank, far or near."""
        experts = self.here * self.nodes
        far = census[:, experts:].view(self.nodes, self.inner, self.nodes).sum(0).max()
        parts = self.nodes * self.inner // self.etp
        near = census[:, :experts].sum(0).view(parts, -1).sum(1).max()
        return int(max(far, near))

    def start(
        self, experts: Experts, x: Tensor, routing: Routing, to_nodes: Sorted, census: Tensor
    ) -> Callable[[], Tensor]:
        """Sends tokens [tokens, width] on their way; who asks gets the sum of what their experts made of them."""
        far_table, near_table = self.tables(census)
        to_nodes = to_nodes.first(int(far_table[self.far.index].sum()))
        crossing = to_nodes.sent(x)
        far = Leg(self.far, far_table, len(crossing), x.device)
        arriving = far.start_out(crossing)
        k = max(routing.per_token, 1)
        which = (to_nodes.tokens if routing.per_token else to_nodes.order)[: to_nodes.used]

        def of_each(values: Tensor) -> Tensor:
            return values.view(-1, k).index_select(0, which)

        weighing = far.start_out(of_each(routing.weights))
        numbers = far.out(of_each(routing.experts)).flatten() - self.far.index * self.here
        keys = None if routing.keys is None else far.out(of_each(routing.keys)).flatten()

        def finish() -> Tensor:
            rows, weights = arriving(), weighing().flatten()
            inside = (numbers >= 0) & (numbers < self.here)
            order = Sorted.by(
                torch.where(inside, numbers, self.here),
                self.here,
                torch.arange(len(rows), device=rows.device).repeat_interleave(k),
                num_tokens=len(rows),
                per_token=k,
                keys=keys,
            ).first(int(near_table[self.near.index].sum()))
            handed = order.sent(rows)
            near = Leg(self.near, near_table, len(handed), x.device, etp=self.etp)
            arrived = near.start_out(handed)()
            own = None if order.keys is None else near.out(order.keys)
            made = near.start_back(experts(arrived, near.ends, own))()
            home = far.start_back(order.received(made, torch.where(inside, weights, 0)))()
            return to_nodes.summed(home)

        return finish
