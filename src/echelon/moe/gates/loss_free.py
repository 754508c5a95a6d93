"""Balance without a loss. Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts":

    s = sigmoid(W·x)                            chosen: the k largest of s_i + b_i        weights: s_i, without b
    after each step:  b_i <- b_i + u · sign(mean of c - c_i)        c_i: choices of expert i in the global batch

The bias has no gradient and affects the choice, not the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.moe.gates.expert_selection import affinity, normalise, score_function_errors, stable_top_k
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, token_choice_routing
from echelon.rng import ZEROS


class LossFree(TokenGate):
    """`speed` is the paper's u. The paper's weights are not normalised."""

    bias: Tensor
    balances_by_load = True
    wide_buffers = ("bias",)

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        speed: float = 0.001,
        score: str = "sigmoid",
        normalise: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__(width, num_experts, k, errors=score_function_errors(score))
        self.speed, self.score, self.normalise, self.scale = speed, score, normalise, scale
        self.register_buffer("bias", torch.zeros(num_experts))
        self._param_init["bias"] = ZEROS

    @torch.no_grad()
    def end_step(self, load: Tensor) -> None:
        deficit = load.sum() - load * self.num_experts  # exact, in integers
        self.bias += self.speed * deficit.sign().to(self.bias.dtype)

    def choose(self, scores: Tensor) -> Routing:
        s = affinity(scores, self.score)
        _, experts = stable_top_k(self.candidates(s.detach() + self.bias), self.k)
        weights = s.gather(-1, experts)
        weights = normalise(weights) if self.normalise else weights
        return token_choice_routing(experts, self.scale * weights, self.loss(s), self.num_experts)

    def candidates(self, biased: Tensor) -> Tensor:
        """Scores to choose by; -inf is never chosen."""
        return biased

    def loss(self, s: Tensor) -> Tensor:
        return s.new_zeros(len(s))
