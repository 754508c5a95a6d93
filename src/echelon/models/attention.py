"""Self-attention with grouped queries, for both language models.

The number of heads follows from the width of the projections, so that a tensor-parallel rank with some of the heads
needs no change. `CoreAttention` is a module of its own, so that context parallelism and TeraPipe can replace what
happens between the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels import tensor_metadata
from echelon.kernels.attention.blockwise_attention import PLAIN_SCORES, ScoreOptions
from echelon.kernels.attention.rope import Rotation, apply_rotary, split_and_rotate_qkv, split_qkv
from echelon.kernels.gemm.fused_linear import project
from echelon.models.attention_config import RopeScaling
from echelon.models.layers import Linear, RMSNorm, can_fuse_gemm, project_all
from echelon.models.model_config import ModelConfig


def document_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """[1 or B, T]: the position of each token in its document, or in the sequence where there are no documents."""
    index = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    if documents is None:
        return index
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(is_first, index, 0).cummax(1).values


def rope_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> Rotation:
    """Cosines and sines of rotary position embedding in at least fp32, computed once per forward pass."""
    # In fp64: at position 8192 an fp32 angle is already wrong by 5e-4, and the table is small.
    rate = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    size = 1.0
    if scaling is not None:
        rate, size = scaling.scale(rate, theta), scaling.rotation_scale
    angle = positions.unsqueeze(-1) * rate
    wide = torch.promote_types(dtype, torch.float32)
    return (size * angle.cos()).to(wide), (size * angle.sin()).to(wide)


@dataclass(frozen=True)
class AttentionContext:
    """Positions, attention mask and RoPE angles of a batch, computed once per forward pass.

    >>> context = ec.AttentionContext(positions=torch.arange(4)[None], documents=torch.tensor([[0, 0, 1, 1]]))
    >>> context.mask[0, 0, 3].tolist()
    [False, False, True, True]
    """

    positions: Tensor
    """[1 or B, T]: position of each token"""
    documents: Tensor | None = None
    """[1 or B, all tokens]: document index of every key; none: one document"""
    causal: bool = True
    """each token attends only to earlier ones and itself"""
    rope: Rotation | None = None
    offset: int = 0
    """number of earlier tokens, where TeraPipe passes a sequence slice by slice"""
    _window_masks: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def mask(self) -> Tensor | None:
        """[.., T, all tokens], True where a query (row) attends to a key (column); none: full or causal."""
        queries = self.positions.shape[1]
        if self.documents is None:
            if not self.offset:
                return None
            shape = (queries, self.offset + queries)
            return torch.ones(shape, dtype=torch.bool, device=self.positions.device).tril(self.offset)
        query_documents = self.documents[:, self.offset : self.offset + queries]
        same = query_documents.unsqueeze(2) == self.documents.unsqueeze(1)
        return (same.tril(self.offset) if self.causal else same).unsqueeze(1)

    def window_mask(self, window: int | None) -> Tensor | None:
        """`mask`, where a query attends only to the last `window` tokens, itself included."""
        queries = self.positions.shape[1]
        keys = self.offset + queries
        if window is None or (self.causal and keys <= window):
            return self.mask
        if not self.causal:
            raise ValueError(f"a window counts earlier tokens (window={window}); use it with causal attention")
        if window not in self._window_masks:
            shape, device = (queries, keys), self.positions.device
            recent = torch.ones(shape, dtype=torch.bool, device=device).tril(self.offset).triu(self.offset - window + 1)
            self._window_masks[window] = recent if self.mask is None else self.mask & recent
        return self._window_masks[window]

    def slice_tokens(self, start: int, stop: int) -> AttentionContext:
        """The context of tokens start .. stop - 1, which attend to all earlier tokens too."""
        rope = (self.rope[0][:, start:stop], self.rope[1][:, start:stop]) if self.rope is not None else None
        documents = self.documents[:, :stop] if self.documents is not None else None
        return AttentionContext(self.positions[:, start:stop], documents, self.causal, rope, start)

    def select_sequences(self, rows: slice | Tensor) -> AttentionContext:
        """The context of some of the sequences."""

        def select(x: Tensor) -> Tensor:
            return x if len(x) == 1 else x[rows]

        rope = (select(self.rope[0]), select(self.rope[1])) if self.rope is not None else None
        documents = select(self.documents) if self.documents is not None else None
        return AttentionContext(select(self.positions), documents, self.causal, rope, self.offset)


class AttentionBackend(Protocol):
    """Attention over keys and values that this rank does not hold: context parallelism, or earlier TeraPipe slices."""

    def attend(
        self,
        core: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The output of attention for the local queries, from local queries, keys and values."""
        ...


QKV = tuple[Tensor, Tensor, Tensor]
"""queries, keys and values"""
PrepareQKV = Callable[[Tensor, Tensor, Tensor, AttentionContext], QKV]


class CoreAttention(nn.Module):
    """softmax(q k) v with q [B, H, T, head_dim], k and v of as many heads or fewer.

    The head dim of the output is that of the values. With `prepare`, q, k and v are outputs of the projections, which
    it turns into heads: recompute=selective then recomputes QK norms and rotations together with the core. `scores`
    has the core's own scale, cap and window. `sinks` [H] join the denominator of every row of their head.

    >>> q = torch.ones(1, 2, 4, 8)
    >>> ec.CoreAttention()(q, q, q, ec.AttentionContext(positions=torch.arange(4)[None])).shape
    torch.Size([1, 2, 4, 8])
    """

    backend: AttentionBackend | None = None
    """replaces local attention; none: all tokens are local"""

    def __init__(self, dropout: float = 0.0, scores: ScoreOptions = PLAIN_SCORES) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scores = scores

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        prepare: PrepareQKV | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[B, H, T, head_dim]"""
        if prepare is not None:
            q, k, v = prepare(q, k, v, context)
        if self.backend is not None:
            return self.backend.attend(self, q, k, v, context, sinks)
        return self.local_attention(q, k, v, context, sinks)

    def local_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention where k and v hold every token of the sequence."""
        if self.scores.softcap is not None or sinks is not None or (self.training and self.dropout.p > 0):
            return self._by_scores(q, k, v, context, sinks)
        gqa, mask = q.shape[1] != k.shape[1], context.window_mask(self.scores.window)
        causal, scale = mask is None and context.causal, self.scores.scale
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)

    def _by_scores(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, sinks: Tensor | None) -> Tensor:
        # Fused kernels have no caps and no sinks, and draw dropout masks themselves; ours are a function of the
        # probability's index.
        repeat, mask, softcap = q.shape[1] // k.shape[1], context.window_mask(self.scores.window), self.scores.softcap
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        if mask is None and context.causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = (q * self.scores.factor(q.shape[-1])) @ k.transpose(2, 3)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], dim=-1)
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        probabilities = scores.softmax(-1, dtype=wide).to(v.dtype)
        dropped: Tensor = self.dropout(probabilities if sinks is None else probabilities[..., :-1])
        return dropped @ v


class Attention(nn.Module):
    """Grouped-query attention."""

    recompute_output = False
    """`o` recomputes its input from what the core saved, instead of saving it once more in another dtype"""
    share_input = ("q", "k", "v")
    """layers with one input, called together"""
    fuses_rope = True
    """at most RoPE is between projections and core: a kernel may rotate the output of the fused GEMM in place"""

    def __init__(self, config: ModelConfig, *, bias: bool, out_bias: bool = False) -> None:
        """`bias`: of the q, k and v projections; `out_bias`: of the output projection."""
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * self.head_dim, config.kv_heads * self.head_dim
        self.q = Linear(config.width, queries, bias=bias)
        self.k = Linear(config.width, keys, bias=bias)
        self.v = Linear(config.width, keys, bias=bias)
        self.core = CoreAttention(config.dropout)
        self.o = Linear(queries, config.width, bias=out_bias)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self._attend(x, context).transpose(1, 2).flatten(2)
        return project_output(self.o, y, recompute=self.recompute_output)

    def _attend(self, x: Tensor, context: AttentionContext) -> Tensor:
        projections = (self.q, self.k, self.v)
        if self.fuses_rope and can_fuse_gemm(x, *projections):
            heads, kv_heads = (len(layer.weight) // self.head_dim for layer in projections[:2])
            qkv = project(x, *projections)
            if context.rope is None:
                q, k, v = split_qkv(qkv, heads, kv_heads)
            else:
                q, k, v = split_and_rotate_qkv(qkv, context.rope, heads, kv_heads)
            out: Tensor = self.core(q, k, v, context)
        else:
            out = self.core(*project_all(x, *projections), context, self._prepare)
        return out

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> QKV:
        """Split the outputs of the projections into heads, and normalise and rotate them."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (*self._normalise(q, k), v))
        return (q, k, v) if context.rope is None else (apply_rotary(q, context.rope), apply_rotary(k, context.rope), v)

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class QKNormAttention(Attention):
    """Attention that normalises each head's queries and keys (Qwen3), which bounds the scores."""

    fuses_rope = False

    def __init__(self, config: ModelConfig, *, bias: bool) -> None:
        super().__init__(config, bias=bias)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.epsilon) for _ in range(2))

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)


def project_output(projection: nn.Module, y: Tensor, *, recompute: bool) -> Tensor:
    """Apply the output projection; with `recompute` it reads y in backward from what the core saved."""
    if recompute:
        saved = y.detach()
        tensor_metadata.attach_recompute(y, lambda: saved)
    out: Tensor = projection(y)
    return out
