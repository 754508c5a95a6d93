"""Experts choose tokens, few experts each. Zhou et al. 2022, section 3.3: as expert choice (expert_choice.py), but

    A = argmax of  sum of S^T·A + lambda · H(A)   with rows = k, columns <= b, 0 <= A <= 1        (assignment.py)
    each expert takes its k tokens with the largest A; weights: S, as before

A itself has no gradient. Rounding it can give a token one expert more than b, where A is fractional.
"""

from __future__ import annotations

import math

from torch import Tensor

from echelon.moe.gates.balanced_assignment import dual_prices
from echelon.moe.gates.expert_choice import ExpertChoice
from echelon.moe.gates.gate import raise_errors


class CappedExpertChoice(ExpertChoice):
    """`cap` is the paper's b, `entropy` its lambda; 2 and 3 experts are its caps, and 3 lost nothing."""

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: float = 2.0,
        *,
        cap: int = 3,
        entropy: float = 0.001,
        rounds: int = 100,
        local_groups: int = 1,
    ) -> None:
        wrong = [] if cap >= k else [f"tokens have k experts on average, above the cap (k={k}, cap={cap}); raise it"]
        if entropy <= 0 or rounds < 1:
            wrong.append(f"entropy must be above 0 and rounds 1 or more (entropy={entropy}, rounds={rounds})")
        raise_errors("CappedExpertChoice", wrong)
        super().__init__(width, num_experts, k, local_groups=local_groups)
        self.cap, self.entropy, self.rounds = cap, entropy, rounds

    def preferences(self, s: Tensor, taken: int) -> Tensor:
        num_experts, num_tokens = s.shape[1:]
        # With few tokens each expert still takes one, so that some tokens exceed the cap.
        cap = max(self.cap, math.ceil(taken * num_experts / num_tokens))
        # Within a row A is monotonic in S - v, which distinguishes values that A rounds to 0 or 1.
        return s - dual_prices(s, taken, cap, self.entropy, self.rounds)[1].unsqueeze(1)
