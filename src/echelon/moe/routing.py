"""What a gate decides: which token goes to which expert, with which weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Assignments of tokens to experts as flat lists, of sizes that follow from shapes alone.

    An expert can have any number of them: who gathers tokens by expert sorts the assignments, and never has to ask the
    device how many there are.
    """

    tokens: Tensor
    """[A] int64: the token, counted through all groups"""
    experts: Tensor
    """[A] int64: its expert; the number of experts means that the assignment was dropped and goes nowhere"""
    weights: Tensor
    """[A]: what the expert's output is multiplied by, with a gradient; 0 where dropped"""
    loss: Tensor
    """[G]: the balance losses of each group, times their coefficients, as the papers add them to a mean over tokens:
    who adds them to a sum over tokens multiplies each by the tokens of its group"""
    load: Tensor
    """[E] int64: assignments of each expert before any was dropped"""
    dropped: Tensor
    """[] int64: assignments that found no room"""
    num_tokens: int
    """the tokens of all groups"""
    choices_per_token: int = 0
    """assignments of each token where they are listed token by token; 0: they are in another order"""
    dropout_keys: Tensor | None = None
    """[A] int64: what decides which hidden units dropout inside the experts drops; none: none"""

    @property
    def num_experts(self) -> int:
        return len(self.load)

    def select_tokens(self, tokens: Tensor) -> Routing:
        """The assignments of some tokens, each of which gets its place in `tokens` as its number.

        The number of tokens stands for padding, which has none.

        The list becomes shorter where it goes token by token. Otherwise nobody knows without asking the device how many
        assignments are left, and those of other tokens become dropped ones. Loss, load and dropped stay those of whole
        groups: who adds them up over ranks counts them once.
        """
        new = torch.arange(len(tokens), device=tokens.device)
        if self.choices_per_token:
            each = torch.arange(self.choices_per_token, device=tokens.device)
            real = tokens < self.num_tokens
            at = (torch.where(real, tokens, 0).unsqueeze(1) * self.choices_per_token + each).flatten()
            here = real.repeat_interleave(self.choices_per_token)
            return replace(
                self,
                tokens=new.repeat_interleave(self.choices_per_token),
                experts=torch.where(here, self.experts.index_select(0, at), self.num_experts),
                weights=torch.where(here, self.weights.index_select(0, at), 0),
                num_tokens=len(tokens),
            )
        numbers = tokens.new_full((self.num_tokens + 1,), -1).index_copy(0, tokens, new)
        number = numbers.index_select(0, self.tokens)
        here = number >= 0
        return replace(
            self,
            tokens=number.clamp(min=0),
            experts=torch.where(here, self.experts, self.num_experts),
            weights=torch.where(here, self.weights, 0),
            num_tokens=len(tokens),
        )


def token_choice_routing(
    experts: Tensor, weights: Tensor, loss: Tensor, num_experts: int, within_capacity: Tensor | None = None
) -> Routing:
    """Each token has chosen experts [G, T, k]; the number of experts stands for a choice that was not made.

    `kept` says which of them found room; none: all did.
    """
    groups, tokens, k = experts.shape
    made = experts < num_experts
    sent = made if within_capacity is None else made & within_capacity
    return Routing(
        tokens=torch.arange(groups * tokens, device=experts.device).repeat_interleave(k),
        experts=torch.where(sent, experts, num_experts).flatten(),
        weights=torch.where(sent, weights, 0).flatten(),
        loss=loss,
        load=count_assignments(experts.flatten(), num_experts),
        dropped=(made & ~sent).sum(),
        num_tokens=groups * tokens,
        choices_per_token=k,
    )


def expert_choice_routing(tokens: Tensor, weights: Tensor, num_tokens: int) -> Routing:
    """Each expert has chosen tokens [G, E, k] of its group, which has `num_tokens`. There is nothing to balance."""
    groups, num_experts, k = tokens.shape
    first = torch.arange(0, groups * num_tokens, num_tokens, device=tokens.device).view(-1, 1, 1)
    experts = torch.arange(num_experts, device=tokens.device).repeat_interleave(k).repeat(groups)
    return Routing(
        tokens=(tokens + first).flatten(),
        experts=experts,
        weights=weights.flatten(),
        loss=weights.new_zeros(groups),
        load=count_assignments(experts, num_experts),
        dropped=experts.new_zeros(()),
        num_tokens=groups * num_tokens,
    )


def count_assignments(experts: Tensor, num_experts: int) -> Tensor:
    """[..., E] int64: how often each expert is in the last dim. The number of experts is not counted."""
    # Sums of integers do not depend on their order, so that this is exact on a GPU too.
    zeros = experts.new_zeros(*experts.shape[:-1], num_experts + 1)
    return zeros.scatter_add(-1, experts, torch.ones_like(experts))[..., :num_experts]
