"""`Routing`, the output of a gate: which token goes to which expert, with which weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Assignments of tokens to experts as flat tensors, whose sizes follow from shapes alone.

    Sorting them by expert needs no synchronisation with the device, however many each expert has.
    """

    tokens: Tensor
    """[A] int64: index of the token in all groups"""
    experts: Tensor
    """[A] int64: its expert; `num_experts` marks a dropped assignment"""
    weights: Tensor
    """[A]: weight of the expert's output, differentiable; 0 where dropped"""
    loss: Tensor
    """[G]: weighted balance losses of each group, relative to a mean over tokens: a sum over tokens takes each times
    the tokens of its group"""
    load: Tensor
    """[E] int64: assignments of each expert before dropping"""
    dropped: Tensor
    """[] int64: assignments beyond the capacity"""
    num_tokens: int
    """of all groups"""
    choices_per_token: int = 0
    """assignments of each token, if they are listed token by token; 0: another order"""
    dropout_keys: Tensor | None = None
    """[A] int64: keys of the masks of expert dropout; none: no dropout"""

    @property
    def num_experts(self) -> int:
        return len(self.load)

    def select_tokens(self, tokens: Tensor) -> Routing:
        """The assignments of some tokens, renumbered by their index in `tokens`; `num_tokens` marks padding.

        Assignments in token order are gathered. Otherwise their number is unknown without synchronisation, and those of
        other tokens become dropped. Loss, load and dropped stay those of full groups: ranks must not add them up twice.
        """
        new, experts, weights = torch.arange(len(tokens), device=tokens.device), self.experts, self.weights
        if self.choices_per_token:
            each = torch.arange(self.choices_per_token, device=tokens.device)
            real = tokens < self.num_tokens
            at = (torch.where(real, tokens, 0).unsqueeze(1) * self.choices_per_token + each).flatten()
            here, number = (x.repeat_interleave(self.choices_per_token) for x in (real, new))
            experts, weights = experts.index_select(0, at), weights.index_select(0, at)
        else:
            numbers = tokens.new_full((self.num_tokens + 1,), -1).index_copy(0, tokens, new)
            number = numbers.index_select(0, self.tokens)
            here, number = number >= 0, number.clamp(min=0)
        return replace(
            self,
            tokens=number,
            experts=torch.where(here, experts, self.num_experts),
            weights=torch.where(here, weights, 0),
            num_tokens=len(tokens),
        )


def token_choice_routing(
    experts: Tensor, weights: Tensor, loss: Tensor, num_experts: int, within_capacity: Tensor | None = None
) -> Routing:
    """Routing where tokens choose experts [G, T, k]; `num_experts` marks a choice that was not made.

    `within_capacity` marks the choices that are not dropped; none: all.
    """
    groups, tokens, k = experts.shape
    made = experts < num_experts
    sent = made if within_capacity is None else made & within_capacity
    return Routing(
        tokens=torch.arange(groups * tokens, device=experts.device).repeat_interleave(k),
        experts=torch.where(sent, experts, num_experts).flatten(),
        weights=torch.where(sent, weights, 0).flatten(),
        loss=loss,
        load=count_tokens_per_expert(experts.flatten(), num_experts),
        dropped=(made & ~sent).sum(),
        num_tokens=groups * tokens,
        choices_per_token=k,
    )


def expert_choice_routing(tokens: Tensor, weights: Tensor, num_tokens: int) -> Routing:
    """Routing where experts choose tokens [G, E, k] of their group of `num_tokens`: balanced by construction."""
    groups, num_experts, k = tokens.shape
    first = torch.arange(0, groups * num_tokens, num_tokens, device=tokens.device).view(-1, 1, 1)
    experts = torch.arange(num_experts, device=tokens.device).repeat_interleave(k).repeat(groups)
    return Routing(
        tokens=(tokens + first).flatten(),
        experts=experts,
        weights=weights.flatten(),
        loss=weights.new_zeros(groups),
        load=count_tokens_per_expert(experts, num_experts),
        dropped=experts.new_zeros(()),
        num_tokens=groups * num_tokens,
    )


def count_tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """[..., E] int64: occurrences of each expert along the last dim, without `num_experts`."""
    # Integer sums do not depend on their order: deterministic on a GPU too.
    zeros = experts.new_zeros(*experts.shape[:-1], num_experts + 1)
    return zeros.scatter_add(-1, experts, torch.ones_like(experts))[..., :num_experts]
