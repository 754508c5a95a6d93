"""Experts: feed-forward networks of one shape, of which each token passes through some."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels.gemm.grouped_gemm import grouped_gemm
from echelon.kernels.layers.swiglu import swiglu
from echelon.moe.routing import Routing
from echelon.rng import RandomDraws, bits, keep_mask

ACTIVATIONS = ("swiglu", "gelu", "relu")


class Experts(nn.Module):
    """`up` holds what an expert reads its input with: one matrix, or gate and up side by side (swiglu)."""

    def __init__(
        self, num_experts: int, width: int, ffn: int, *, activation: str = "swiglu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is not one of {', '.join(ACTIVATIONS)} (activation={activation})")
        self.activation = activation
        self.up = nn.Parameter(torch.empty(num_experts, 2 if activation == "swiglu" else 1, ffn, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, ffn))
        self.drop = ExpertDropout(dropout)
        self.first_unit = 0
        """number of the first hidden unit at hand, in the whole expert"""

    def forward(
        self,
        x: Tensor,
        expert_ends: Tensor,
        dropout_keys: Tensor | None = None,
        through: Callable[[Experts], Tensor] | None = None,
    ) -> Tensor:
        """[rows, width] from rows that come expert by expert; each expert's end at `ends` [experts] int32.

        `keys` [rows] say what dropout does with a row. An expert without rows takes part: its matrices are read by no
        product, and their gradient is 0. `through` takes over: whoever has rows that come in parts must still call the
        module once, for its parameters are there only around its call.
        """
        return (
            self.apply_weights(x, self.up, self.down, expert_ends, dropout_keys) if through is None else through(self)
        )

    def apply_weights(
        self, x: Tensor, up: Tensor, down: Tensor, expert_ends: Tensor, dropout_keys: Tensor | None
    ) -> Tensor:
        """What `forward` would do with other weights."""
        h = grouped_gemm(x, up.flatten(1, 2), expert_ends)
        if self.activation == "swiglu":
            h = swiglu(h)
        else:
            h = F.gelu(h, approximate="tanh") if self.activation == "gelu" else F.relu(h)
        if dropout_keys is not None:
            h = h * self.drop.keep_factors(dropout_keys, self.first_unit, h)
        return grouped_gemm(h, down, expert_ends)

    def extra_repr(self) -> str:
        experts, _, ffn, width = self.up.shape
        return f"{experts} x ({width} -> {ffn} -> {width}), {self.activation}"


class ExpertDropout(RandomDraws):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def assignment_keys(self, x: Tensor, routing: Routing) -> Tensor | None:
        """[A] int64, of each assignment of the tokens of x [G, T, width]; none where nothing is dropped."""
        if not self.training or self.p == 0:
            return None
        groups, tokens = x.shape[:2]
        if self.stream is None:
            each = torch.randint(1 << 62, (groups * tokens,), device=x.device)
        else:
            each = bits(*self.keys_and_index((groups, tokens), self.window, x.device)).flatten()
        return bits(0, each.index_select(0, routing.tokens) ^ routing.experts)

    def keep_factors(self, keys: Tensor, first_unit: int, like: Tensor) -> Tensor:
        """[rows, units]: 0, or one over the chance to be kept, for the units of `like` from number `first` on."""
        units = torch.arange(first_unit, first_unit + like.shape[1], device=like.device)
        return keep_mask(keys, units, self.p).to(like.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site!r}"
