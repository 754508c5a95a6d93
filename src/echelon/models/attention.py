"""Causal self-attention with grouped queries, for both language models.

The number of heads is read from the projections' width: a projection that holds only some of the heads needs no change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels import note
from echelon.kernels.linear import project
from echelon.kernels.note import Note
from echelon.kernels.rope import Rotation, rotate, rotated_heads
from echelon.models.linear import Linear, one_product


def positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """[1 or B, T]: the position of each token in its document, or in the sequence where there are no documents."""
    place = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    if documents is None:
        return place
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(first, place, 0).cummax(1).values


def document_mask(documents: Tensor | None) -> Tensor | None:
    """[B, 1, T, T], True where a token (row) may see another (column): not later, and in the same document."""
    if documents is None:
        return None
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return same.tril().unsqueeze(1)


def rotation(place: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The angles of rotary position embedding, once per forward pass, in at least 32 bits."""
    # In fp64: at position 8192 an fp32 angle is already wrong by 5e-4, and the table is small.
    rate = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=place.device) / head_dim)
    angle = place.unsqueeze(-1) * rate
    wide = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(wide), angle.sin().to(wide)


@dataclass(frozen=True)
class Seen:
    """Where each token of a batch is and what it may see, once per forward pass."""

    place: Tensor
    """[1 or B, T]: its position"""
    mask: Tensor | None = None
    """[.., T, T], True where a token (row) may see another (column); none: all before it"""
    turn: Rotation | None = None

    def cut(self, start: int, stop: int) -> Seen:
        """The same for positions start .. stop - 1, which see those before them too."""
        mask, turn = self.mask, self.turn
        if mask is None:
            shape = (stop - start, stop)
            mask = torch.ones(shape, dtype=torch.bool, device=self.place.device).tril(start)
        else:
            mask = mask[..., start:stop, :stop]
        turn = (turn[0][:, start:stop], turn[1][:, start:stop]) if turn is not None else None
        return Seen(self.place[:, start:stop], mask, turn)


class Past(Protocol):
    """What came before the tokens at hand, where a sequence is given piece by piece."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, head_dim] of all tokens so far, from those of the tokens at hand."""
        ...


class Attention(nn.Module):
    past: Past | None = None
    remake = False
    """what `o` reads is found where attention keeps it, and not kept once more in another type"""

    def __init__(self, width: int, heads: int, kv_heads: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = Linear(width, width, bias=bias)
        self.k = Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v = Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o = Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotation: Rotation | None = None) -> Tensor:
        q, k, v = self._rotated(x, rotation)
        if self.past is not None:
            k, v = self.past.extend(k, v)
        if self.training and self.dropout.p > 0:
            y = self._with_dropout(q, k, v, mask)
        else:
            gqa = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
        y = y.transpose(1, 2).flatten(2)
        if self.remake:
            kept = y.detach()
            note.write(y, Note(again=lambda _gradient: kept))
        out: Tensor = self.o(y)
        return out

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = (self.q, self.k, self.v)
        if rotation is not None and one_product(x, *parts):
            heads, kv_heads = (len(part.weight) // self.head_dim for part in parts[:2])
            return rotated_heads(project(x, *parts), rotation, heads, kv_heads)
        q, k, v = (self._heads(part(x)) for part in parts)
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # Fused kernels draw masks of their own; here each probability's mask must be a function of its place.
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = (q * self.head_dim**-0.5) @ k.transpose(2, 3)
        scores = scores.masked_fill(~mask, float("-inf"))
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        probabilities: Tensor = self.dropout(scores.softmax(-1, dtype=wide).to(v.dtype))
        return probabilities @ v
