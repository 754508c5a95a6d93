"""Attention over one block of keys at a time, and the merging of what the blocks give.

[Note: parts of a softmax]

A block of keys gives a row of queries its own softmax's output, and the logarithm of that softmax's sum (lse):

    S = q k' / sqrt(head_dim)        lse = log sum exp(S)        out = exp(S - lse) v

Blocks that a row has seen are one block, whose sum is the sum of theirs:

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

No exponent is above 0, so nothing overflows; a block of which a row sees nothing has lse = -inf, and weight 0. Backward
needs no merging: with the whole row's lse and out, a block makes its own part of every gradient.

    P = exp(S - lse)      dP = g v'      dS = P (dP - sum(g out))      dq = dS k      dk = dS' q      dv = P' g

Nothing here is seen by autograd: who calls this writes its own backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.attention import sdpa_lse
from echelon.kernels.memory_limits import MAX_PENDING, MAX_PENDING_BYTES

MAX_SCORES = 1 << 26
"""scores that plain torch holds at a time: rows are taken so many at once"""


@torch.no_grad()
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Tq, D], lse [B, H, Tq] in 32 bits or more) of q [B, H, Tq, D] and k, v [B, KV, Tk, D].

    Query head h reads kv head h // (H / KV). `mask` is True where a query may see a key, and `factor` is what
    probabilities are multiplied by after the softmax (dropout); both broadcast to [B, H, Tq, Tk]. Rows that see nothing
    give 0 and -inf. In memory `out` is [B, Tq, H, D].
    """
    _check_shapes(q, k, causal)
    if dropout_mask is None and (kernel := sdpa_lse.find_kernel(q, k, v, mask, causal)) is not None:
        return kernel.attend(q, k, v, mask, causal)
    out, lse = _empty_tokens_first(q, q.dtype), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    hidden = None if mask is None else mask.logical_not()
    for rows, keys in _query_chunks(q, k, causal):
        scores = _scores(q[:, :, rows], k[:, :, keys])
        _mask_scores_(scores, _mask_block(hidden, q, k, rows, keys), causal, rows, keys)
        found = scores.logsumexp(-1)
        weights = _softmax_(scores, found)
        if (kept := _mask_block(dropout_mask, q, k, rows, keys)) is not None:
            weights *= kept
        product = _group_heads(weights, k) @ v[:, :, keys].to(weights.dtype)
        out[:, :, rows], lse[:, :, rows] = product.view(*found.shape, -1), found
    return out, lse


@torch.no_grad()
def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's part of (dq, dk, dv), given the whole attention's out and lse, and the gradient of that out."""
    _check_shapes(q, k, causal)
    if dropout_mask is None and (kernel := sdpa_lse.find_kernel(q, k, v, mask, causal)) is not None:
        return kernel.attend_backward(gradient, q, k, v, out, lse, mask, causal)
    dtype = lse.dtype
    dq = _empty_tokens_first(q, q.dtype)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    hidden = None if mask is None else mask.logical_not()
    for rows, keys in _query_chunks(q, k, causal):
        queries, block_k, block_v = q[:, :, rows], k[:, :, keys], v[:, :, keys].to(dtype)
        scores = _scores(queries, block_k)
        _mask_scores_(scores, _mask_block(hidden, q, k, rows, keys), causal, rows, keys)
        weights = _softmax_(scores, lse[:, :, rows])
        g = gradient[:, :, rows].to(dtype)
        dweights = (_group_heads(g, k) @ block_v.transpose(-1, -2)).view_as(weights)
        used = weights
        if (kept := _mask_block(dropout_mask, q, k, rows, keys)) is not None:
            used = weights * kept
            dweights *= kept
        dv[:, :, keys] += _group_heads(used, k).transpose(-1, -2) @ _group_heads(g, k)
        delta = (g * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
        dscores = _group_heads(dweights.sub_(delta).mul_(weights).mul_(_scale(q)), k)
        dq[:, :, rows] = (dscores @ block_k.to(dtype)).view(queries.shape)
        dk[:, :, keys] += dscores.transpose(-1, -2) @ _group_heads(queries.to(dtype), k)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


PartialResult = tuple[Tensor, ...]
"""of some rows: out and lse, or a gradient"""


class _PartialAccumulator:
    """Parts of rows that come one after another and are brought together several at a time.

    Each time, the sum is read and written in 32 bits, which costs more than to read a part. So parts wait, as long as
    they are small: where they are large, the products that make them take so much longer that it does not matter.
    Parts are of any rows; where rows begin or end, the work is cut.
    """

    def __init__(self, like: Tensor):
        self._like = like
        self._pending: list[tuple[slice, PartialResult]] = []
        self._total: PartialResult | None = None

    def _add(self, rows: slice, part: PartialResult) -> None:
        room = MAX_PENDING_BYTES - sum(held[0].nbytes for _, held in self._pending)
        if self._pending and (room < part[0].nbytes or len(self._pending) == MAX_PENDING):
            self._flush()
        self._pending.append((slice(*rows.indices(self._like.shape[2])[:2]), part))

    def _flush(self) -> None:
        self._total = self._total or self._identity()
        for rows, parts in self._row_ranges():
            if parts:
                place = _slice_rows(self._total, rows)
                _combine_parts(place, [*parts, place])
        self._pending = []

    def _combine(self, target: PartialResult) -> PartialResult:
        for rows, parts in self._row_ranges():
            _combine_parts(
                _slice_rows(target, rows), [*parts, _slice_rows(self._total, rows)] if self._total else parts
            )
        return target

    def _row_ranges(self) -> Iterator[tuple[slice, list[PartialResult]]]:
        """Rows, and what is held of all of them."""
        edges = {0, self._like.shape[2]}.union(*((rows.start, rows.stop) for rows, _ in self._pending))
        for start, stop in pairwise(sorted(edges)):
            inside = [(rows.start, part) for rows, part in self._pending if rows.start <= start and stop <= rows.stop]
            yield slice(start, stop), [_slice_rows(part, slice(start - first, stop - first)) for first, part in inside]

    def _identity(self) -> PartialResult:
        raise NotImplementedError


class AttentionMerger(_PartialAccumulator):
    """The attention of q's rows to the blocks of keys that were added, in any order. See the note at the top."""

    @torch.no_grad()
    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Takes what `attend(q[:, :, rows], ...)` gave; it may be read until `result`."""
        self._add(rows, (out, lse))

    @torch.no_grad()
    def result(self) -> tuple[Tensor, Tensor]:
        """(out in q's type, lse); 0 and -inf where nothing was added."""
        q = self._like
        out, lse = self._combine(
            (_empty_tokens_first(q, q.dtype), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)))
        )
        return out, lse

    def _identity(self) -> PartialResult:
        q = self._like
        # Of a row whose lse is -inf, out is not read.
        return _empty_tokens_first(q, accumulation_dtype(q.dtype)), q.new_full(
            q.shape[:3], -inf, dtype=accumulation_dtype(q.dtype)
        )


class GradientAccumulator(_PartialAccumulator):
    """The sum of what blocks add to the gradient of x, rows of dimension 2 as they come, in 32 bits or more."""

    @torch.no_grad()
    def add(self, rows: slice, part: Tensor) -> None:
        """Takes a part of the gradient of x[:, :, rows]; it may be read until `result`."""
        self._add(rows, (part,))

    @torch.no_grad()
    def result(self) -> Tensor:
        """In x's type; 0 where nothing was added."""
        return self._combine((_empty_tokens_first(self._like, self._like.dtype),))[0]

    def _identity(self) -> PartialResult:
        return (_empty_tokens_first(self._like, accumulation_dtype(self._like.dtype)).zero_(),)


@torch.no_grad()
def accumulate_(total: Tensor, part: Tensor) -> None:
    """total += part, where the total is of a wider type."""
    _combine_parts((total,), [(total,), (part,)])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of this type are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _slice_rows(part: PartialResult, rows: slice) -> PartialResult:
    return tuple(x[:, :, rows] for x in part)


def _combine_parts(target: PartialResult, parts: list[PartialResult]) -> None:
    """Writes what the parts are together; `to` may be one of them."""
    if parts and dispatch.use_triton(target[0]) and all(x.stride(-1) == 1 for x in target):
        from echelon.kernels.attention.blockwise_attention_triton import combine_parts

        combine_parts(target, parts)
    elif len(target) == 1:
        total = torch.zeros_like(target[0], dtype=accumulation_dtype(target[0].dtype))
        for (part,) in parts:
            total += part
        target[0].copy_(total)
    elif not parts:
        target[0].zero_()
        target[1].fill_(-inf)
    else:
        lse = torch.stack([of_part for _, of_part in parts]).logsumexp(0)
        base, total = _finite_lse(lse), torch.zeros_like(target[0], dtype=lse.dtype)
        for out, of_part in parts:
            weight = (of_part - base).exp_().unsqueeze(-1)
            total += torch.where(weight > 0, weight * out, 0.0)
        target[0].copy_(total)
        target[1].copy_(lse)


def _softmax_(scores: Tensor, lse: Tensor) -> Tensor:
    return scores.sub_(_finite_lse(lse).unsqueeze(-1)).exp_()


def _finite_lse(lse: Tensor) -> Tensor:
    """With 0 for -inf, so that exp(-inf - it) is 0."""
    return lse.masked_fill(lse == -inf, 0.0)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    scores = _group_heads(q.to(dtype) * _scale(q), k) @ k.to(dtype).transpose(-1, -2)
    return scores.view(*q.shape[:3], k.shape[2])


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """[B, KV, H / KV * T, ...] of x [B, H, T, ...]: the heads that read one kv head are rows of one matrix."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _mask_scores_(scores: Tensor, hidden: Tensor | None, causal: bool, rows: slice, keys: slice) -> None:
    if causal:
        row, key = (torch.arange(s.start, s.stop, device=scores.device) for s in (rows, keys))
        scores.masked_fill_(key > row.unsqueeze(-1), -inf)
    if hidden is not None:
        scores.masked_fill_(hidden, -inf)


def _mask_block(x: Tensor | None, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor | None:
    return None if x is None else x.expand(*q.shape[:3], k.shape[2])[:, :, rows, keys]


def _query_chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the keys that they may see."""
    length, keys = q.shape[2], k.shape[2]
    step = max(MAX_SCORES // max(q.shape[0] * q.shape[1] * keys, 1), 1)
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _empty_tokens_first(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Of q's shape; in memory [B, Tq, H, D], so that the heads of a token are one row for the product after them."""
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)


def _check_shapes(q: Tensor, k: Tensor, causal: bool) -> None:
    assert q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads"
    assert not causal or q.shape[2] == k.shape[2], f"causal, but {q.shape[2]} queries and {k.shape[2]} keys"
