"""Top-1 gating. Fedus, Zoph and Shazeer 2021, "Switch Transformers", sections 2.1 to 2.4. For a group of T tokens:

    p     = softmax(Wr·x)      in fp32          y = p_i(x) · E_i(x)  for i = argmax p(x)
    f_i   = 1/T · tokens with argmax i          P_i = 1/T · sum over tokens of p_i
    loss  = alpha · N · sum over i of f_i · P_i
    expert capacity = T / N · capacity factor; tokens are assigned in order up to the capacity

In training the router's input is multiplied by numbers from 1 - jitter to 1 + jitter (appendix C). Its weights start
from a normal truncated at two standard deviations of sqrt(s / fan-in) with s = 0.1, a tenth of the usual. In
fine-tuning experts have another dropout rate (section 2.4: 0.4 where other layers have 0.1): see moe/experts.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echelon.moe.gates.expert_selection import stable_top_k, switch_loss, within_capacity
from echelon.moe.gates.gate import TokenGate
from echelon.moe.routing import Routing, token_choice_routing
from echelon.rng import RandomDraws, truncated_normal_init

INIT_SCALE = 0.1
"""s: initial variance times fan-in (section 2.4, table 3)"""


class Switch(TokenGate):
    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int = 1,
        *,
        capacity_factor: float | None = 1.25,
        balance: float = 0.01,
        jitter: float = 0.01,
        local_groups: int = 1,
    ) -> None:
        wrong = [] if k == 1 else [f"a token has one expert (k={k}); use k=1, or another gate"]
        init = truncated_normal_init(math.sqrt(INIT_SCALE / max(width, 1)))
        super().__init__(width, num_experts, k, local_groups=local_groups, init=init, errors=wrong)
        self.capacity_factor, self.balance, self.jitter = capacity_factor, balance, jitter
        self.noise = RandomDraws()

    def scores(self, x: Tensor) -> Tensor:
        if self.training and self.jitter:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x * (1 + self.jitter * (2 * self.noise.uniform(x.detach()) - 1))
        return self.logits(x, self.weight)

    def choose(self, scores: Tensor) -> Routing:
        p, num_experts = scores.softmax(-1), self.num_experts
        weights, experts = stable_top_k(p, 1)
        within = within_capacity(experts, self.capacity_factor, num_experts)
        return token_choice_routing(experts, weights, switch_loss(self.balance, experts, p), num_experts, within)
