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

from echelon.moe.routing import Routing, count


@dataclass(frozen=True)
class Sorted:
    """The assignments of a routing by expert; dropped ones are last."""

    tokens: Tensor
    """[A]: whose turn it is"""
    order: Tensor
    """[A]: where each was in the routing's list"""
    place: Tensor
    """[A]: the inverse: where each of the routing's list is now"""
    counts: Tensor
    """[E] int64: assignments of each expert"""
    num_tokens: int
    per_token: int
    keys: Tensor | None = None
    """[A] int64: what dropout inside the experts follows from"""
    used: int | None = None
    """rows that are sent, where the host knows how many go anywhere; none: all A"""

    @classmethod
    def of(cls, routing: Routing) -> Sorted:
        return cls.by(
            routing.experts,
            routing.num_experts,
            routing.tokens,
            num_tokens=routing.num_tokens,
            per_token=routing.per_token,
            keys=routing.keys,
        )

    @classmethod
    def by(
        cls,
        experts: Tensor,
        num_experts: int,
        tokens: Tensor,
        *,
        num_tokens: int,
        per_token: int,
        keys: Tensor | None = None,
    ) -> Sorted:
        """`experts` [A] are numbers below `num_experts`, or that itself where an assignment goes nowhere."""
        order = torch.argsort(experts, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(
            tokens=tokens.index_select(0, order),
            order=order,
            place=place,
            counts=count(experts, num_experts),
            num_tokens=num_tokens,
            per_token=per_token,
            keys=None if keys is None else keys.index_select(0, order),
        )

    @property
    def ends(self) -> Tensor:
        """[E] int32: where each expert's run of assignments ends."""
        return self.counts.cumsum(0).to(torch.int32)

    def first(self, used: int) -> Sorted:
        """Without the rows of assignments that go nowhere, which are those after so many."""
        if used == len(self.tokens):
            return self
        return replace(self, used=used, keys=None if self.keys is None else self.keys[:used])

    def sent(self, x: Tensor) -> Tensor:
        """[A, ...]: each assignment's token, from [tokens, ...]."""
        out: Tensor = _Sent.apply(x, self)
        return out

    def in_order(self, x: Tensor) -> Tensor:
        """[A, ...] in the order of the experts, from the routing's."""
        return x.index_select(0, self.order[: self.used])

    def received(self, y: Tensor, weights: Tensor) -> Tensor:
        """[tokens, ...]: the sum of each token's results, times their weights in the routing's order."""
        return self.summed(y * self.in_order(weights).unsqueeze(1).to(y.dtype))

    def summed(self, y: Tensor) -> Tensor:
        out: Tensor = _Summed.apply(y, self)
        return out

    def add_up(self, y: Tensor) -> Tensor:
        """[tokens, ...]: the sum of what belongs to each token. See the note at the top."""
        if self.per_token and self.used is None:
            return y.index_select(0, self.place).view(self.num_tokens, self.per_token, *y.shape[1:]).sum(1)
        if self.per_token:
            return self._by_choice(y)
        wide = torch.promote_types(y.dtype, torch.float32)
        out = y.new_zeros(self.num_tokens, y.shape[1], dtype=wide)
        return out.index_add_(0, self.tokens[: self.used], y.to(wide)).to(y.dtype)

    def _by_choice(self, y: Tensor) -> Tensor:
        """First choices, second ones, and so on: where many go nowhere, a row for each of them would be too many."""
        y = torch.cat([y, y.new_zeros(1, *y.shape[1:])])  # what has no row reads this one
        place = self.place.clamp(max=len(y) - 1).view(self.num_tokens, self.per_token)
        out = y.index_select(0, place[:, 0])
        for choice in range(1, self.per_token):
            out += y.index_select(0, place[:, choice])
        return out


class _Sent(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Sorted) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens[: order.used])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.order.add_up(gradients[0]), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Sorted) -> Tensor:
        ctx.order = order
        return order.add_up(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.order.tokens[: ctx.order.used]), None
