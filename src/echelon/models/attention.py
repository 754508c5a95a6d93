"""Self-attention with grouped queries, for both language models.

The number of heads is read from the projections' width: a projection that holds only some of the heads needs no change.
What happens between the projections is a module of its own, `Core`, so that it can be taken over where the tokens that
see each other are on different devices or come one slice after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels import tensor_metadata
from echelon.kernels.attention.rope import Rotation, apply_rotary, split_and_rotate_qkv
from echelon.kernels.gemm.fused_linear import project
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.models.attention_config import RopeScaling
from echelon.models.layers import Linear, RMSNorm, can_fuse_gemm, project_all


def document_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """[1 or B, T]: the position of each token in its document, or in the sequence where there are no documents."""
    place = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    if documents is None:
        return place
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(first, place, 0).cummax(1).values


def rope_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> Rotation:
    """The angles of rotary position embedding, once per forward pass, in at least 32 bits."""
    # In fp64: at position 8192 an fp32 angle is already wrong by 5e-4, and the table is small.
    rate = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_seq_len * rate / (2 * math.pi)
        kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        rate = rate * (kept + (1 - kept) / scaling.factor)
    angle = positions.unsqueeze(-1) * rate
    wide = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(wide), angle.sin().to(wide)


@dataclass(frozen=True)
class AttentionContext:
    """Where each token of a batch is and what it may see, once per forward pass."""

    positions: Tensor
    """[1 or B, T]: its position"""
    documents: Tensor | None = None
    """[1 or B, all tokens]: the document of every token that may be seen; none: all are of one"""
    causal: bool = True
    """a token sees those before it alone"""
    rope: Rotation | None = None
    offset: int = 0
    """how many tokens were before those at hand, where a sequence is given piece by piece"""

    @cached_property
    def mask(self) -> Tensor | None:
        """[.., T, all tokens], True where a token (row) may see another (column); none: all, or all before it."""
        queries = self.positions.shape[1]
        if self.documents is None:
            if not self.offset:
                return None
            shape = (queries, self.offset + queries)
            return torch.ones(shape, dtype=torch.bool, device=self.positions.device).tril(self.offset)
        mine = self.documents[:, self.offset : self.offset + queries]
        same = mine.unsqueeze(2) == self.documents.unsqueeze(1)
        return (same.tril(self.offset) if self.causal else same).unsqueeze(1)

    def slice_tokens(self, start: int, stop: int) -> AttentionContext:
        """The same for positions start .. stop - 1, which see those before them too."""
        turn = (self.rope[0][:, start:stop], self.rope[1][:, start:stop]) if self.rope is not None else None
        documents = self.documents[:, :stop] if self.documents is not None else None
        return AttentionContext(self.positions[:, start:stop], documents, self.causal, turn, start)

    def select_sequences(self, rows: slice | Tensor) -> AttentionContext:
        """The same for some of the sequences."""

        def of(x: Tensor) -> Tensor:
            return x if len(x) == 1 else x[rows]

        turn = (of(self.rope[0]), of(self.rope[1])) if self.rope is not None else None
        documents = of(self.documents) if self.documents is not None else None
        return AttentionContext(of(self.positions), documents, self.causal, turn, self.offset)


class AttentionBackend(Protocol):
    """How a core reaches tokens that are not at hand: other devices have them, or they came before."""

    def attend(self, core: CoreAttention, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """What `Core.forward` gives, from queries, keys and values of the tokens at hand."""
        ...


QKV = tuple[Tensor, Tensor, Tensor]
"""queries, keys and values"""
PrepareQKV = Callable[[Tensor, Tensor, Tensor, AttentionContext], QKV]


class CoreAttention(nn.Module):
    """What attention does between its projections: q [B, H, T, head_dim], k and v of as many heads or fewer.

    Values may have other head dims than queries and keys, and their own is that of the result. With `prepare` q, k and
    v are what the projections made, of any shapes, and it makes of them what attends: norms of heads and rotations are
    then repeated with the core (recompute=selective)."""

    backend: AttentionBackend | None = None
    """takes over; none: all tokens are at hand"""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, prepare: PrepareQKV | None = None
    ) -> Tensor:
        """[B, H, T, head_dim]"""
        if prepare is not None:
            q, k, v = prepare(q, k, v, context)
        if self.backend is not None:
            return self.backend.attend(self, q, k, v, context)
        return self.local_attention(q, k, v, context)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """All that a token may see is in k and v."""
        if self.training and self.dropout.p > 0:
            return self._with_dropout(q, k, v, context)
        gqa, mask = q.shape[1] != k.shape[1], context.mask
        causal = mask is None and context.causal
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        # Fused kernels draw masks of their own; here each probability's mask must be a function of its place.
        repeat, mask = q.shape[1] // k.shape[1], context.mask
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        if mask is None and context.causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        probabilities: Tensor = self.dropout(scores.softmax(-1, dtype=wide).to(v.dtype))
        return probabilities @ v


class Attention(nn.Module):
    recompute_output = False
    """what `o` reads is found where attention keeps it, and not kept once more in another type"""
    share_input = ("q", "k", "v")
    """layers that read one input and are asked for their outputs together"""
    fuses_rope = True
    """nothing but the rotation is between the projections and the core: a kernel may do it where the product lies"""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        head_dim: int = 0,
        bias: bool,
        out_bias: bool = False,
        dropout: float,
    ) -> None:
        """`bias` is of queries, keys and values, `out_bias` of the output."""
        super().__init__()
        self.head_dim = head_dim or width // heads
        self.q = Linear(width, heads * self.head_dim, bias=bias)
        self.k = Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v = Linear(width, kv_heads * self.head_dim, bias=bias)
        self.core = CoreAttention(dropout)
        self.o = Linear(heads * self.head_dim, width, bias=out_bias)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self._attend(x, context).transpose(1, 2).flatten(2)
        if self.recompute_output:
            kept = y.detach()
            tensor_metadata.attach(y, TensorMetadata(recompute=lambda _gradient: kept))
        out: Tensor = self.o(y)
        return out

    def _attend(self, x: Tensor, context: AttentionContext) -> Tensor:
        parts = (self.q, self.k, self.v)
        if self.fuses_rope and context.rope is not None and can_fuse_gemm(x, *parts):
            heads, kv_heads = (len(part.weight) // self.head_dim for part in parts[:2])
            out: Tensor = self.core(*split_and_rotate_qkv(project(x, *parts), context.rope, heads, kv_heads), context)
        else:
            out = self.core(*project_all(x, *parts), context, self._prepare)
        return out

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> QKV:
        """From what the projections made to what attends."""
        q, k, v = (self._split_heads(y) for y in (q, k, v))
        return (q, k, v) if context.rope is None else (apply_rotary(q, context.rope), apply_rotary(k, context.rope), v)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class QKNormAttention(Attention):
    fuses_rope = False

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        head_dim: int,
        bias: bool = False,
        epsilon: float,
        dropout: float,
    ) -> None:
        super().__init__(width, heads, kv_heads, head_dim=head_dim, bias=bias, dropout=dropout)
        self.q_norm, self.k_norm = RMSNorm(head_dim, epsilon), RMSNorm(head_dim, epsilon)

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> QKV:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        return (q, k, v) if context.rope is None else (apply_rotary(q, context.rope), apply_rotary(k, context.rope), v)
