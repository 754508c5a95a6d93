"""Plain top-k gating of softmax scores, with Switch's loss over all k choices.

    s   = softmax(W·x)                             weights s_i of the k largest, divided by their sum or not
    f_i = 1/T · choices of expert i                P_i = 1/T · sum over tokens of s_i
    loss = balance · E · sum over i of f_i · P_i   at least k · balance, where all experts are used alike

Mixtral (Jiang et al. 2024) takes the softmax of the k largest logits, which is the softmax of all divided by the sum of
the k largest. The papers do not state their balance loss; this is that of the published code, whose coefficient
(router_aux_loss_coef: Mixtral 0.02, Qwen 0.001) is of all MoE layers together. `balance` is of one layer: the published
one divided by the number of MoE layers.
"""

from __future__ import annotations

from torch import Tensor

from echelon.moe.gates.expert_selection import (
    affinity,
    normalise,
    score_function_errors,
    stable_top_k,
    switch_loss,
    within_capacity,
)
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, token_choice_routing


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
        s = affinity(scores, self.score)
        weights, experts = stable_top_k(s, self.k)
        loss = switch_loss(self.balance, experts, s if self.score == "softmax" else normalise(s))
        weights = normalise(weights) if self.normalise else weights
        within = within_capacity(experts, self.capacity_factor, self.num_experts)
        return token_choice_routing(experts, weights, loss, self.num_experts, within)


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
