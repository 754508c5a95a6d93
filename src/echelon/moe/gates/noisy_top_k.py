"""Noisy top-k gating. Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1 and appendix A.

    H(x)_i  = (x·Wg)_i + StandardNormal() · softplus((x·Wnoise)_i)                       (noise in training alone)
    G(x)    = softmax(KeepTopK(H(x), k))
    P(x, i) = Φ(((x·Wg)_i - kth_excluding(H(x), k, i)) / softplus((x·Wnoise)_i))

    Importance(X) = sum over x of G(x)         L_importance = w_importance · CV(Importance)²
    Load(X)_i     = sum over x of P(x, i)      L_load       = w_load · CV(Load)²

P(x, i) is the probability that expert i is chosen if its noise is redrawn: a differentiable count of choices.
kth_excluding is the k-th largest of H without H_i. Both matrices start at zero, so that the noise alone decides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.moe.gates.expert_selection import scatter_dense, stable_top_k
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, token_choice_routing
from echelon.rng import ZEROS, RandomDraws

MIN_NOISE_STD = 1e-6
"""P is divided by the softplus, which can underflow"""


class NoisyLogits(NamedTuple):
    """Clean and noisy logits of one level of gating."""

    clean: Tensor
    noisy: Tensor
    std: Tensor
    """standard deviation of the noise"""


class NoisyTopK(TokenGate):
    noise_weight: nn.Parameter

    def __init__(self, width: int, num_experts: int, k: int, *, w_importance: float = 0.1, w_load: float = 0.1) -> None:
        super().__init__(width, num_experts, k, init=ZEROS)
        self.add_router("noise_weight", num_experts, ZEROS)
        self.w_importance, self.w_load = w_importance, w_load
        self.noise = RandomDraws()

    def scores(self, x: Tensor) -> Tensor:
        """x·Wg, H(x) and the softplus."""
        clean, raw = self.logits(x, self.weight, self.noise_weight).chunk(2, dim=-1)
        return add_noise(clean, raw, self.noise if self.training else None)

    @property
    def num_scores(self) -> int:
        return 3 * self.num_experts

    def choose(self, scores: Tensor) -> Routing:
        logits = NoisyLogits(*scores.chunk(3, dim=-1))
        values, experts = stable_top_k(logits.noisy, self.k)
        weights = values.softmax(-1)
        importance = scatter_dense(experts, weights, self.num_experts).sum(1)
        load = selection_probability(logits, self.k).sum(1)
        loss = self.w_importance * cv_squared(importance) + self.w_load * cv_squared(load)
        return token_choice_routing(experts, weights, loss, self.num_experts)


def add_noise(clean: Tensor, raw: Tensor, noise: RandomDraws | None) -> Tensor:
    """[.., 3 E]: clean logits, noisy logits and std of the noise, concatenated."""
    std = F.softplus(raw).clamp(min=MIN_NOISE_STD)
    return torch.cat((clean, clean if noise is None else clean + noise.normal(clean) * std, std), dim=-1)


def selection_probability(logits: NoisyLogits, k: int) -> Tensor:
    """P(x, i) for each token and expert."""
    size = logits.noisy.shape[-1]
    if k == size:
        return torch.ones_like(logits.noisy)
    values, experts = stable_top_k(logits.noisy, k + 1)
    chosen = scatter_dense(experts[..., :k], torch.ones_like(values[..., :k]), size) > 0
    # Without one of the top k, the next one becomes the k-th.
    others = torch.where(chosen, values[..., k:], values[..., k - 1 : k])
    out: Tensor = torch.special.ndtr((logits.clean - others) / logits.std)
    return out


def cv_squared(x: Tensor) -> Tensor:
    """The squared coefficient of variation along the last dim: population variance over squared mean."""
    mean = x.mean(-1)
    # No assignments: balanced.
    return x.var(-1, correction=0) / mean.square().clamp(min=torch.finfo(x.dtype).tiny)
