"""Permutes tokens into the order of their experts, and sums the outputs per token.

[Note: deterministic sums]
A token of k experts is copied k times, and k outputs are summed. Atomic additions on a GPU would round in a different
order each time. Where assignments are in token order (`choices_per_token`) both sums, of outputs in forward and of
gradients in backward, are over k neighbours. Only expert choice has no such order, and sums in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.moe.routing import Routing, count_tokens_per_expert


@dataclass(frozen=True)
class TokenPermutation:
    """The assignments of a routing sorted by expert, dropped ones last."""

    tokens: Tensor
    """[A]: token of each assignment"""
    order: Tensor
    """[A]: index of each assignment in the routing"""
    inverse: Tensor
    """[A]: the inverse permutation"""
    counts: Tensor
    """[E] int64: assignments of each expert"""
    num_tokens: int
    choices_per_token: int
    dropout_keys: Tensor | None = None
    """[A] int64: keys of expert dropout"""
    num_sent: int | None = None
    """assignments that are not dropped, if the host knows; none: A"""

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
        """`experts` [A]: the expert of each assignment; `num_experts` marks a dropped one."""
        order = torch.argsort(experts, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(
            tokens=tokens.index_select(0, order),
            order=order,
            inverse=inverse,
            counts=count_tokens_per_expert(experts, num_experts),
            num_tokens=num_tokens,
            choices_per_token=choices_per_token,
            dropout_keys=None if dropout_keys is None else dropout_keys.index_select(0, order),
        )

    @property
    def expert_ends(self) -> Tensor:
        """[E] int32: end of each expert's assignments."""
        return self.counts.cumsum(0).to(torch.int32)

    def truncate(self, num_sent: int) -> TokenPermutation:
        """Leave out dropped assignments, those after the first `num_sent`."""
        if num_sent == len(self.tokens):
            return self
        keys = None if self.dropout_keys is None else self.dropout_keys[:num_sent]
        return replace(self, num_sent=num_sent, dropout_keys=keys)

    def permute(self, x: Tensor) -> Tensor:
        """[A, ...]: the token of each assignment, from [tokens, ...]."""
        out: Tensor = _Permute.apply(x, self, False)
        return out

    def reorder(self, x: Tensor) -> Tensor:
        """[A, ...] in the order of experts, from that of the routing."""
        return x.index_select(0, self.order[: self.num_sent])

    def unpermute(self, y: Tensor, weights: Tensor) -> Tensor:
        """[tokens, ...]: the weighted sum of each token's outputs; weights are in the order of the routing."""
        return self.sum_per_token(y * self.reorder(weights).unsqueeze(1).to(y.dtype))

    def sum_per_token(self, y: Tensor) -> Tensor:
        out: Tensor = _Permute.apply(y, self, True)
        return out

    def copy_tokens(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.tokens[: self.num_sent])

    def reduce_tokens(self, y: Tensor) -> Tensor:
        """[tokens, ...]: the sum over the assignments of each token. See [Note: deterministic sums]."""
        if self.choices_per_token and self.num_sent is None:
            return y.index_select(0, self.inverse).view(self.num_tokens, self.choices_per_token, *y.shape[1:]).sum(1)
        if self.choices_per_token:
            return self._sum_by_choice(y)
        wide = torch.promote_types(y.dtype, torch.float32)
        out = y.new_zeros(self.num_tokens, y.shape[1], dtype=wide)
        return out.index_add_(0, self.tokens[: self.num_sent], y.to(wide)).to(y.dtype)

    def _sum_by_choice(self, y: Tensor) -> Tensor:
        """Add first choices, second choices and so on: materialising dropped assignments would take too much memory."""
        y = torch.cat([y, y.new_zeros(1, *y.shape[1:])])  # dropped assignments read this row
        inverse = self.inverse.clamp(max=len(y) - 1).view(self.num_tokens, self.choices_per_token)
        out = y.index_select(0, inverse[:, 0])
        for choice in range(1, self.choices_per_token):
            out += y.index_select(0, inverse[:, choice])
        return out


class _Permute(Function):
    """Copy tokens to assignments, or with `inverse` sum the assignments of a token: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: TokenPermutation, inverse: bool) -> Tensor:
        ctx.order, ctx.inverse = order, inverse
        return order.reduce_tokens(x) if inverse else order.copy_tokens(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.order.copy_tokens if ctx.inverse else ctx.order.reduce_tokens)(gradients[0]), None, None
