"""Noisy top-k gating. Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1, appendices A and B.

    H(x)_i  = (x·Wg)_i + StandardNormal() · softplus((x·Wnoise)_i)                       (noise in training alone)
    G(x)    = softmax(KeepTopK(H(x), k))
    P(x, i) = Φ(((x·Wg)_i - kth_excluding(H(x), k, i)) / softplus((x·Wnoise)_i))

    Importance(X) = sum over x of G(x)         L_importance = w_importance · CV(Importance)²
    Load(X)_i     = sum over x of P(x, i)      L_load       = w_load · CV(Load)²

P(x, i) is the probability that expert i is chosen if its noise is redrawn: a differentiable count of choices.
kth_excluding is the k-th largest of H without H_i. Both matrices start at zero, so that the noise alone decides.

Appendix B has two levels: a gate over groups of experts, and one inside each group.

    y = sum over i, j of G_primary(x)_i · G_i(x)_j · E_ij(x)

    Importance(X)_ij = sum over x of G_primary(x)_i · G_i(x)_j
    Load(X)_ij       = Load_primary(X)_i · Load_i(X_i)_j / |X_i|         X_i: tokens with G_primary(x)_i > 0

with the losses above. Load_i(X_i)_j alone would have no gradient towards the primary gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.moe import most_square_divisor
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


class Hierarchical(TokenGate):
    """`k` experts of a token lie in `k_groups` groups, as many in each. The paper has two of two: k=4, k_groups=2."""

    noise_weight: nn.Parameter
    group_weight: nn.Parameter
    group_noise_weight: nn.Parameter

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        num_groups: int | None = None,
        k_groups: int = 2,
        w_importance: float = 0.1,
        w_load: float = 0.1,
    ) -> None:
        a = most_square_divisor(num_experts) if num_groups is None else num_groups
        super().__init__(width, num_experts, k, init=ZEROS, errors=_argument_errors(num_experts, k, a, k_groups))
        self.num_groups, self.k_groups = a, k_groups
        self.add_router("noise_weight", num_experts, ZEROS)
        self.add_router("group_weight", a, ZEROS)
        self.add_router("group_noise_weight", a, ZEROS)
        self.w_importance, self.w_load = w_importance, w_load
        self.noise = RandomDraws()

    def scores(self, x: Tensor) -> Tensor:
        """Of groups and experts together: logits, noisy logits, std of the noise."""
        routers = (self.group_weight, self.weight, self.group_noise_weight, self.noise_weight)
        clean, raw = self.logits(x, *routers).chunk(2, dim=-1)
        return add_noise(clean, raw, self.noise if self.training else None)

    @property
    def num_scores(self) -> int:
        return 3 * (self.num_groups + self.num_experts)

    def choose(self, scores: Tensor) -> Routing:
        a, b, inside = self.num_groups, self.num_experts // self.num_groups, self.k // self.k_groups
        parts = scores.unflatten(-1, (3, a + self.num_experts))
        primary = NoisyLogits(*parts[..., :a].unbind(-2))
        secondary = NoisyLogits(*parts[..., a:].unflatten(-1, (a, b)).unbind(-3))

        values, groups = stable_top_k(primary.noisy, self.k_groups)
        g_primary = values.softmax(-1)  # [G, T, k_groups]
        values, members = stable_top_k(secondary.noisy, inside)
        g_groups = values.softmax(-1)  # [G, T, a, k in a group]: of every group, chosen or not

        at = groups.unsqueeze(-1).expand(*groups.shape, inside)
        weights = (g_primary.unsqueeze(-1) * g_groups.gather(2, at)).flatten(2)
        experts = (groups.unsqueeze(-1) * b + members.gather(2, at)).flatten(2)

        importance = scatter_dense(experts, weights, self.num_experts).sum(1)
        loss = self.w_importance * cv_squared(importance)
        loss = loss + self.w_load * cv_squared(self._load(primary, secondary, groups, inside))
        return token_choice_routing(experts, weights, loss, self.num_experts)

    def _load(self, primary: NoisyLogits, secondary: NoisyLogits, groups: Tensor, inside: int) -> Tensor:
        """[G, E]"""
        ones = primary.clean.new_ones(groups.shape)
        chosen = scatter_dense(groups, ones, self.num_groups)  # [G, T, a]: the token is in X_i
        group_load = selection_probability(primary, self.k_groups).sum(1)
        member_load = (selection_probability(secondary, inside) * chosen.unsqueeze(-1)).sum(1)
        return (group_load.unsqueeze(-1) * member_load / chosen.sum(1).clamp(min=1).unsqueeze(-1)).flatten(1)


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


def _argument_errors(num_experts: int, k: int, num_groups: int, k_groups: int) -> list[str]:
    if num_groups < 1 or num_experts % num_groups:
        return [f"num_groups does not divide the experts ({num_experts} experts, num_groups={num_groups}); change one"]
    if not 1 <= k_groups <= num_groups:
        return [f"k_groups is not in 1 .. {num_groups} (k_groups={k_groups}, num_groups={num_groups}); change one"]
    if k % k_groups or k // k_groups > num_experts // num_groups:
        return [
            f"k is not a multiple of k_groups with at most {num_experts // num_groups} experts in a group "
            f"(k={k}, k_groups={k_groups}); change one"
        ]
    return []
