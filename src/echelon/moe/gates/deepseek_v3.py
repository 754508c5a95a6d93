"""DeepSeek-V3's gate (2024, section 2.1.2): a bias instead of a loss (loss_free.py), few nodes per token, and a slight
loss against sequences that are uneven in themselves.

    s = sigmoid(W·x)        candidates: experts of the M nodes with the largest sum of their K/M highest s + b
    chosen: the K largest s_i + b_i        weights: s_i / sum of the chosen s

    f_i  = N/(K·T) · tokens that have s_i among their K largest      s without b, of all nodes, as the paper writes it
    P_i  = 1/T · sum over tokens of s_i / sum over j of s_j          loss = alpha · sum over i of f_i · P_i

The paper does not say whether the sum of highest affinities includes the bias; its published code does, as does this.
"""

from __future__ import annotations

from torch import Tensor

from echelon.moe.gates.expert_selection import group_limit_errors, limit_groups, normalise, stable_top_k
from echelon.moe.gates.gate import raise_errors
from echelon.moe.gates.loss_free import LossFree
from echelon.moe.routing import count_tokens_per_expert


class DeepSeekV3(LossFree):
    """`num_groups` nodes of which a token sees `group_limit`, the paper's M."""

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        num_groups: int = 8,
        group_limit: int = 4,
        balance: float = 0.0001,
        speed: float = 0.001,
        score: str = "sigmoid",
        normalise: bool = True,
        scale: float = 1.0,
    ) -> None:
        raise_errors("DeepSeekV3", group_limit_errors(num_experts, k, num_groups, group_limit))
        super().__init__(width, num_experts, k, speed=speed, score=score, normalise=normalise, scale=scale)
        self.num_groups, self.group_limit, self.balance = num_groups, group_limit, balance

    def candidates(self, biased: Tensor) -> Tensor:
        return limit_groups(biased, self.num_groups, self.group_limit, best=max(1, self.k // self.group_limit))

    def loss(self, s: Tensor) -> Tensor:
        _, experts = stable_top_k(s, self.k)
        counts = count_tokens_per_expert(experts.flatten(1), self.num_experts).to(s.dtype)
        f = self.num_experts / (self.k * s.shape[1]) * counts
        return self.balance * (f * normalise(s).mean(1)).sum(-1)
