"""Experts choose tokens. Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing". For a group of n tokens:

    S = softmax(X·Wg)  over the e experts        each expert takes its k = n·c/e tokens with the largest S
    weights: S of token and expert

Every expert has the same load by construction, so that there is no loss. A token has any number of experts, c on
average; c = 2, 1 and 0.5 in the paper. They depend on every other token of the group: the gate leaks.
"""

from __future__ import annotations

from torch import Tensor

from echelon.moe.gates.expert_selection import stable_top_k
from echelon.moe.gates.gate import Gate
from echelon.moe.routing import Routing, expert_choice_routing


class ExpertChoice(Gate):
    """`k` is the paper's c."""

    leaks_future = True

    def __init__(self, width: int, num_experts: int, k: float = 2.0, *, local_groups: int = 1) -> None:
        wrong = []
        if not 0 < k <= num_experts:
            wrong.append(f"k is not above 0 and at most {num_experts}, the experts (k={k}); change one")
        super().__init__(width, num_experts, k, local_groups=local_groups, errors=wrong)

    def tokens_per_expert(self, num_tokens: int) -> int:
        """The paper's k in a group of this size, rounded down, at least 1."""
        return max(1, int(num_tokens * self.k / self.num_experts + 1e-9))

    def choose(self, scores: Tensor) -> Routing:
        s = scores.softmax(-1).transpose(1, 2)  # [G, e, n]
        taken = self.tokens_per_expert(s.shape[-1])
        _, tokens = stable_top_k(self.preferences(s.detach(), taken), taken)
        return expert_choice_routing(tokens, s.gather(-1, tokens), s.shape[-1])

    def preferences(self, s: Tensor, taken: int) -> Tensor:
        """[G, e, n]: the score by which an expert ranks tokens."""
        return s
