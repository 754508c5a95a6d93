"""Top-2 gating with capacity. Lepikhin et al. 2020, "GShard", algorithm 1. For a group of S tokens and E experts:

    g    = softmax(Wg·x)                       m_e = 1/S · sum over tokens of g_e
    g1, e1, g2, e2 = the two largest           weights g1/(g1+g2) and g2/(g1+g2)
    first choices, token by token:             assigned while the expert has fewer than C = 2·S/E
    second choices, behind all first ones:     made if 2·g2/(g1+g2) > uniform(0, 1), within capacity
    l_aux = 1/E · sum over e of c_e/S · m_e    c_e: first choices of expert e, dropped or not

A dropped assignment has output 0: the residual connection carries the token. The paper gives no coefficient of l_aux;
0.01 is that of its authors' code. Its listing counts a second choice that was not made against the capacity; its text
and its authors' code do not, and neither does this.

In the paper every other layer has experts, and groups are parts of a batch: here a group is a sequence, or one of the
`local_groups` parts of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.moe.gates.expert_selection import stable_top_k, within_capacity
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, count_tokens_per_expert, token_choice_routing
from echelon.rng import RandomDraws

ORDERS = ("choices", "tokens")


class GShard(TokenGate):
    """`order` of capacity slots: all first choices first, as in the paper, or token by token, which does not leak."""

    leaks_future = True

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int = 2,
        *,
        capacity_factor: float | None = 1.0,
        balance: float = 0.01,
        random_second: bool = True,
        order: str = "choices",
        local_groups: int = 1,
    ) -> None:
        wrong = [] if k == 2 else [f"a token has two experts (k={k}); use k=2, or another gate"]
        if order not in ORDERS:
            wrong.append(f"order is not one of {', '.join(ORDERS)} (order={order}); use one of them")
        super().__init__(width, num_experts, k, local_groups=local_groups, errors=wrong)
        self.capacity_factor, self.balance, self.order = capacity_factor, balance, order
        self.leaks_future = order == "choices" and capacity_factor is not None
        self.random = RandomDraws() if random_second else None

    def scores(self, x: Tensor) -> Tensor:
        """Logits, and the uniform number that decides the second choice (0: it is always made)."""
        logits = self.logits(x, self.weight)
        one = logits[..., 0].detach()
        drawn = self.random.uniform(one) if self.random is not None and self.training else torch.zeros_like(one)
        return torch.cat((logits, drawn.unsqueeze(-1)), dim=-1)

    @property
    def num_scores(self) -> int:
        return self.num_experts + 1

    def choose(self, scores: Tensor) -> Routing:
        tokens, num_experts = scores.shape[1], self.num_experts
        g, drawn = scores[..., :-1].softmax(-1), scores[..., -1]
        values, experts = stable_top_k(g, 2)
        weights = values / values.sum(-1, keepdim=True)

        c = count_tokens_per_expert(experts[..., 0], num_experts).to(g.dtype)
        loss = self.balance / num_experts * (c / tokens * g.mean(1)).sum(-1)

        made = 2 * weights[..., 1] > drawn
        experts = torch.stack((experts[..., 0], torch.where(made, experts[..., 1], num_experts)), dim=-1)
        if self.order == "tokens":
            within = within_capacity(experts, self.capacity_factor, num_experts)
        else:
            within = within_capacity(experts.transpose(1, 2), self.capacity_factor, num_experts)
            within = None if within is None else within.transpose(1, 2)
        return token_choice_routing(experts, weights, loss, num_experts, within)
