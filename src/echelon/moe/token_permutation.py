"""Tokens put in the order of their experts, and what comes back added up token by token.

[Note: no sum in an order that chance decides]
A token that k experts see is sent k times, and k results come back. On a GPU, adding them where they belong in the
order in which they happen to come rounds differently each time. Where assignments are listed token by token
(`per_token`) both sums, of results in forward and of gradients in backward, are over k neighbours instead. Only where
experts choose is there no such list; there sums are made in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.moe.routing import Routing, count_assignments


@dataclass(frozen=True)
class TokenPermutation:
    """The assignments of a routing by expert; dropped ones are last."""

    tokens: Tensor
    """[A]: whose turn it is"""
    order: Tensor
    """[A]: where each was in the routing's list"""
    inverse: Tensor
    """[A]: the inverse: where each of the routing's list is now"""
    counts: Tensor
    """[E] int64: assignments of each expert"""
    num_tokens: int
    choices_per_token: int
    dropout_keys: Tensor | None = None
    """[A] int64: what dropout inside the experts follows from"""
    num_sent: int | None = None
    """rows that are sent, where the host knows how many go anywhere; none: all A"""

    @classmethod
    def from_routing(cls, routing: Routing) -> TokenPermutation:
        return cls.from_experts(
            routing.experts,
            routing.num_experts,
            routing.tokens,
            num_tokens=routing.num_tokens,
            choices_per_token=routing.choices_per_token,
            dropout_keys=routing.dropout_keys,
        )

    @classmethod
    def from_experts(
        cls,
        experts: Tensor,
        num_experts: int,
        tokens: Tensor,
        *,
        num_tokens: int,
        choices_per_token: int,
        dropout_keys: Tensor | None = None,
    ) -> TokenPermutation:
        """`experts` [A] are numbers below `num_experts`, or that itself where an assignment goes nowhere."""
        order = torch.argsort(experts, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(
            tokens=tokens.index_select(0, order),
            order=order,
            inverse=place,
            counts=count_assignments(experts, num_experts),
            num_tokens=num_tokens,
            choices_per_token=choices_per_token,
            dropout_keys=None if dropout_keys is None else dropout_keys.index_select(0, order),
        )

    @property
    def expert_ends(self) -> Tensor:
        """[E] int32: where each expert's run of assignments ends."""
        return self.counts.cumsum(0).to(torch.int32)

    def truncate(self, num_sent: int) -> TokenPermutation:
        """Without the rows of assignments that go nowhere, which are those after so many."""
        if num_sent == len(self.tokens):
            return self
        return replace(
            self, num_sent=num_sent, dropout_keys=None if self.dropout_keys is None else self.dropout_keys[:num_sent]
        )

    def permute(self, x: Tensor) -> Tensor:
        """[A, ...]: each assignment's token, from [tokens, ...]."""
        out: Tensor = _Permute.apply(x, self)
        return out

    def reorder(self, x: Tensor) -> Tensor:
        """[A, ...] in the order of the experts, from the routing's."""
        return x.index_select(0, self.order[: self.num_sent])

    def unpermute(self, y: Tensor, weights: Tensor) -> Tensor:
        """[tokens, ...]: the sum of each token's results, times their weights in the routing's order."""
        return self.sum_per_token(y * self.reorder(weights).unsqueeze(1).to(y.dtype))

    def sum_per_token(self, y: Tensor) -> Tensor:
        out: Tensor = _SumPerToken.apply(y, self)
        return out

    def reduce_tokens(self, y: Tensor) -> Tensor:
        """[tokens, ...]: the sum of what belongs to each token. See the note at the top."""
        if self.choices_per_token and self.num_sent is None:
            return y.index_select(0, self.inverse).view(self.num_tokens, self.choices_per_token, *y.shape[1:]).sum(1)
        if self.choices_per_token:
            return self._sum_by_choice(y)
        wide = torch.promote_types(y.dtype, torch.float32)
        out = y.new_zeros(self.num_tokens, y.shape[1], dtype=wide)
        return out.index_add_(0, self.tokens[: self.num_sent], y.to(wide)).to(y.dtype)

    def _sum_by_choice(self, y: Tensor) -> Tensor:
        """First choices, second ones, and so on: where many go nowhere, a row for each of them would be too many."""
        y = torch.cat([y, y.new_zeros(1, *y.shape[1:])])  # what has no row reads this one
        place = self.inverse.clamp(max=len(y) - 1).view(self.num_tokens, self.choices_per_token)
        out = y.index_select(0, place[:, 0])
        for choice in range(1, self.choices_per_token):
            out += y.index_select(0, place[:, choice])
        return out


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: TokenPermutation) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens[: order.num_sent])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.order.reduce_tokens(gradients[0]), None


class _SumPerToken(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: TokenPermutation) -> Tensor:
        ctx.order = order
        return order.reduce_tokens(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.order.tokens[: ctx.order.num_sent]), None
