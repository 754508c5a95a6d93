"""DeepSeek-V2's gate (2024, sections 2.2.1 to 2.2.3): softmax scores, few devices per token, three balance losses.

    s = softmax(W·x)        candidates: experts of the M devices with the highest s      weights: s_i of the K largest

    f_i   = N/(K·T) · tokens that choose expert i       P_i   = 1/T · sum over tokens of s_i
    f'_d  = mean of f_i over the experts of device d    P'_d  = sum of P_i over them
    f''_d = D/(M·T) · tokens sent to device d           P''_d = P'_d
    loss  = alpha1 · sum of f·P + alpha2 · sum of f'·P' + alpha3 · sum of f''·P''

N experts are in D groups, one per device; T tokens are a sequence. The shared expert belongs to the layer.
"""

from __future__ import annotations

from torch import Tensor

from echelon.moe.gates.expert_selection import group_limit_errors, limit_groups, normalise, scatter_dense, stable_top_k
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, token_choice_routing


class DeepSeekV2(TokenGate):
    """`num_groups` is D and `group_limit` M. The paper does not normalise the weights; published models scale them."""

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        num_groups: int = 8,
        group_limit: int = 3,
        balance_experts: float = 0.003,
        balance_devices: float = 0.05,
        balance_communication: float = 0.02,
        normalise: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__(width, num_experts, k, errors=group_limit_errors(num_experts, k, num_groups, group_limit))
        self.num_groups, self.group_limit = num_groups, group_limit
        self.balance_experts, self.balance_devices = balance_experts, balance_devices
        self.balance_communication = balance_communication
        self.normalise, self.scale = normalise, scale

    def choose(self, scores: Tensor) -> Routing:
        s = scores.softmax(-1)
        _, experts = stable_top_k(limit_groups(s.detach(), self.num_groups, self.group_limit, best=1), self.k)
        weights = s.gather(-1, experts)
        weights = normalise(weights) if self.normalise else weights
        return token_choice_routing(experts, self.scale * weights, self._loss(s, experts), self.num_experts)

    def _loss(self, s: Tensor, experts: Tensor) -> Tensor:
        chosen = scatter_dense(experts, s.new_ones(experts.shape), self.num_experts)  # [G, T, N]
        f = self.num_experts / self.k * chosen.mean(1)
        p = s.mean(1)
        f_device: Tensor = f.unflatten(-1, (self.num_groups, -1)).mean(-1)
        p_device: Tensor = p.unflatten(-1, (self.num_groups, -1)).sum(-1)
        sent: Tensor = chosen.unflatten(-1, (self.num_groups, -1)).amax(-1)  # [G, T, D]: one of its experts or more
        f_sent = self.num_groups / self.group_limit * sent.mean(1)
        return (
            self.balance_experts * (f * p).sum(-1)
            + self.balance_devices * (f_device * p_device).sum(-1)
            + self.balance_communication * (f_sent * p_device).sum(-1)
        )
