"""Experts choose tokens. Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing". For a group of n tokens:

    S = softmax(X·Wg)  over the e experts        each expert takes its k = n·c/e tokens with the largest S
    weights: S of token and expert

Every expert has the same load by construction, so that there is no loss. A token has any number of experts, c on
average; c = 2, 1 and 0.5 in the paper. They depend on every other token of the group: the gate leaks.

Section 3.3 limits the experts of a token to b:

    A = argmax of  sum of S^T·A + lambda · H(A)   with rows = k, columns <= b, 0 <= A <= 1     (balanced_assignment.py)
    each expert takes its k tokens with the largest A; weights: S, as before

A itself has no gradient. Rounding it can give a token one expert more than b, where A is fractional.
"""

from __future__ import annotations

import math

from torch import Tensor

from echelon.moe.gates.balanced_assignment import dual_prices
from echelon.moe.gates.expert_selection import stable_top_k
from echelon.moe.gates.gate import Gate, raise_errors
from echelon.moe.routing import Routing, expert_choice_routing


class ExpertChoice(Gate):
    """`k` is the paper's c."""

    leaks_future = True

    def __init__(self, width: int, num_experts: int, k: float = 2.0, *, local_groups: int = 1) -> None:
        super().__init__(width, num_experts, k, local_groups=local_groups)

    def k_errors(self, num_experts: int, k: float) -> list[str]:
        if 0 < k <= num_experts:
            return []
        return [f"k is not above 0 and at most {num_experts}, the experts (k={k}); change one"]

    def expert_capacity(self, num_tokens: int) -> int:
        """The paper's k in a group of this size, rounded down, at least 1."""
        return max(1, int(num_tokens * self.k / self.num_experts + 1e-9))

    def choose(self, scores: Tensor) -> Routing:
        s = scores.softmax(-1).transpose(1, 2)  # [G, e, n]
        taken = self.expert_capacity(s.shape[-1])
        _, tokens = stable_top_k(self.preferences(s.detach(), taken), taken)
        return expert_choice_routing(tokens, s.gather(-1, tokens), s.shape[-1])

    def preferences(self, s: Tensor, taken: int) -> Tensor:
        """[G, e, n]: the score by which an expert ranks tokens."""
        return s


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
