"""Experts of an MoE layer as grouped GEMMs, and dropout inside them.

[Note: expert dropout]
Dropout inside experts (Fedus et al. 2021, section 2.4) has masks that do not depend on the rank of an expert. A token
has a key, a function of (seed, site, sample, position). With the expert's index it gives the key of an assignment, and
that with the index of the hidden unit decides whether the unit is dropped. Token dispatch sends the keys along.
"""

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
    """MLPs of one shape. `up` holds one matrix per expert, or gate and up (swiglu)."""

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
        """index of the first local hidden unit in the unsharded expert"""

    def forward(
        self,
        x: Tensor,
        expert_ends: Tensor,
        dropout_keys: Tensor | None = None,
        through: Callable[[Experts], Tensor] | None = None,
    ) -> Tensor:
        """[tokens, width] from tokens sorted by expert, each expert's ending at `expert_ends` [experts] int32.

        `dropout_keys` [tokens] select the dropout masks. An expert without tokens has a zero gradient. `through`
        replaces the computation: chunked dispatch must still call the module once, since FSDP gathers its parameters
        only around the call.
        """
        return (
            self.apply_weights(x, self.up, self.down, expert_ends, dropout_keys) if through is None else through(self)
        )

    def apply_weights(
        self, x: Tensor, up: Tensor, down: Tensor, expert_ends: Tensor, dropout_keys: Tensor | None
    ) -> Tensor:
        """`forward` with other weights."""
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
        """[A] int64: a key for each assignment of the tokens of x [G, T, width]; none without dropout."""
        if not self.training or self.p == 0:
            return None
        groups, tokens = x.shape[:2]
        if self.stream is None:
            each = torch.randint(1 << 62, (groups * tokens,), device=x.device)
        else:
            each = bits(*self.keys_and_index((groups, tokens), self.window, x.device)).flatten()
        return bits(0, each.index_select(0, routing.tokens) ^ routing.experts)

    def keep_factors(self, keys: Tensor, first_unit: int, like: Tensor) -> Tensor:
        """[tokens, units]: 0 or 1 / (1 - p) for the hidden units of `like`, from index `first_unit` on."""
        units = torch.arange(first_unit, first_unit + like.shape[1], device=like.device)
        return keep_mask(keys, units, self.p).to(like.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site!r}"
