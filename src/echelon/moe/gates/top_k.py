"""Plain top-k gating of softmax scores, with Switch's loss over all k choices.

    s   = softmax(W·x)                             weights s_i of the k largest, divided by their sum or not
    f_i = 1/T · choices of expert i                P_i = 1/T · sum over tokens of s_i
    loss = balance · E · sum over i of f_i · P_i   at least k · balance, where all experts are used alike

Mixtral (Jiang et al. 2024) takes the softmax of the k largest logits, which is the softmax of all divided by the sum of
the k largest. The papers do not state their balance loss; this is that of the published code, whose coefficient
(router_aux_loss_coef: Mixtral 0.02, Qwen 0.001) is of all layers together. `balance` is of one layer: the published
one divided by the number of layers.
"""

from __future__ import annotations

from torch import Tensor

from echelon.moe.gates.expert_selection import (
    affinity,
    expert_capacity,
    normalise,
    positions_in_expert,
    score_function_errors,
    stable_top_k,
)
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, count_assignments, token_choice_routing


class Mixtral(TokenGate):
    """Weights normalised to sum 1. With a capacity, slots are given in token order; without, no token is dropped."""

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        balance: float = 0.02,
        normalise: bool = True,
        score: str = "softmax",
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__(width, num_experts, k, errors=score_function_errors(score))
        self.balance, self.normalise, self.score = balance, normalise, score
        self.capacity_factor = capacity_factor

    def choose(self, scores: Tensor) -> Routing:
        tokens, num_experts = scores.shape[1], self.num_experts
        s = affinity(scores, self.score)
        weights, experts = stable_top_k(s, self.k)
        f = count_assignments(experts.flatten(1), num_experts).to(s.dtype) / tokens
        shares = s if self.score == "softmax" else normalise(s)
        loss = self.balance * num_experts * (f * shares.mean(1)).sum(-1)
        if self.normalise:
            weights = normalise(weights)
        if self.capacity_factor is None:
            return token_choice_routing(experts, weights, loss, num_experts)
        position = positions_in_expert(experts.flatten(1), num_experts).view_as(experts)
        within_capacity = position < expert_capacity(self.capacity_factor, self.k * tokens, num_experts)
        return token_choice_routing(experts, weights, loss, num_experts, within_capacity)


class Qwen(Mixtral):
    """Qwen1.5-MoE and Qwen2-MoE: weights are not normalised. Qwen3 normalises them."""

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        balance: float = 0.001,
        normalise: bool = False,
        score: str = "softmax",
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__(
            width, num_experts, k, balance=balance, normalise=normalise, score=score, capacity_factor=capacity_factor
        )
