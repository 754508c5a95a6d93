"""Attention over one block of keys at a time, and the merging of partial results by log-sum-exp.

[Note: merging blocks by log-sum-exp]

A block of keys gives a query row its own softmax's output, and the logarithm of that softmax's denominator (lse):

    S = q k' / sqrt(head_dim)        lse = log sum exp(S)        out = exp(S - lse) v

The blocks that a row attends to merge into one block, whose denominator is the sum of theirs:

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

No exponent is above 0, so nothing overflows; a fully masked block has lse = -inf, and weight 0. Backward needs no
merging: given the full row's lse and out, a block computes its own contribution to every gradient.

    P = exp(S - lse)      dP = g v'      dS = P (dP - sum(g out))      dq = dS k      dk = dS' q      dv = P' g

A sink is one more score of every row of a head, without a value. It is no block: it joins the merged row once, and the
output shrinks by what the denominator grew. Given the full row's lse, backward of the blocks does not change.

    lse' = log(exp(lse) + exp(sink))        out' = exp(lse - lse') out        dsink = -sum(exp(sink - lse') sum(g out'))

Autograd sees none of this: callers write their own backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.attention import sdpa_lse
from echelon.kernels.memory_limits import MAX_PENDING, MAX_PENDING_BYTES

MAX_SCORES = 1 << 26
"""scores that plain torch holds at a time: sets the query rows of a chunk"""
MIN_WINDOW_ROWS = 128
"""query rows of a chunk under a short window"""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What a model makes of the scores of queries and keys, beyond q k' / sqrt(head_dim)."""

    scale: float | None = None
    """instead of 1 / sqrt(head_dim)"""
    softcap: float | None = None
    """bounds scores: softcap tanh(score / softcap)"""
    window: int | None = None
    """a query attends to this many tokens, itself and those before it; none: to all before"""

    def factor(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN_SCORES = ScoreOptions()


@torch.no_grad()
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    scores: ScoreOptions = PLAIN_SCORES,
    shift: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, Tq, D], lse [B, H, Tq] in fp32 or fp64) of q [B, H, Tq, D] and k, v [B, KV, Tk, D].

    Query head h reads kv head h // (H / KV). `mask` is True where a query may attend to a key, and `dropout_mask`
    multiplies the probabilities; both broadcast to [B, H, Tq, Tk]. Fully masked rows give 0 and -inf. In memory `out`
    is [B, Tq, H, D]. The first query is `shift` tokens after the first key, for a causal mask and a window.
    """
    _check_shapes(q, k, causal, scores, shift)
    if dropout_mask is None and (kernel := _find_kernel(q, k, v, mask, causal, scores)) is not None:
        return kernel.attend()
    out, lse = _empty_tokens_first(q, q.dtype), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    masked = None if mask is None else mask.logical_not()
    for rows, keys in _query_chunks(q, k, causal, scores.window, shift):
        block = _scores(q, k, scores, rows, keys)
        _hide_(block, _mask_block(masked, q, k, rows, keys), causal, scores.window, rows, keys, shift)
        chunk_lse = block.logsumexp(-1)
        probs = _softmax_(block, chunk_lse)
        if (dropped := _mask_block(dropout_mask, q, k, rows, keys)) is not None:
            probs *= dropped
        values = _group_heads(probs, k) @ v[:, :, keys].to(probs.dtype)
        out[:, :, rows], lse[:, :, rows] = values.view(*chunk_lse.shape, -1), chunk_lse
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
    scores: ScoreOptions = PLAIN_SCORES,
    shift: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's contribution to (dq, dk, dv), given out and lse over all blocks, and the gradient of out."""
    _check_shapes(q, k, causal, scores, shift)
    if dropout_mask is None and (kernel := _find_kernel(q, k, v, mask, causal, scores)) is not None:
        return kernel.attend_backward(gradient, out, lse)
    dtype = lse.dtype
    dq = _empty_tokens_first(q, q.dtype)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    masked = None if mask is None else mask.logical_not()
    for rows, keys in _query_chunks(q, k, causal, scores.window, shift):
        queries, block_k, block_v = q[:, :, rows], k[:, :, keys], v[:, :, keys].to(dtype)
        block = _scores(q, k, scores, rows, keys)
        slope = None if scores.softcap is None else 1 - (block / scores.softcap) ** 2
        _hide_(block, _mask_block(masked, q, k, rows, keys), causal, scores.window, rows, keys, shift)
        probs = _softmax_(block, lse[:, :, rows])
        g = gradient[:, :, rows].to(dtype)
        dprobs = (_group_heads(g, k) @ block_v.transpose(-1, -2)).view_as(probs)
        used = probs
        if (dropped := _mask_block(dropout_mask, q, k, rows, keys)) is not None:
            used = probs * dropped
            dprobs *= dropped
        dv[:, :, keys] += _group_heads(used, k).transpose(-1, -2) @ _group_heads(g, k)
        delta = (g * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
        dprobs = dprobs.sub_(delta).mul_(probs).mul_(scores.factor(q.shape[-1]))
        dscores = _group_heads(dprobs if slope is None else dprobs.mul_(slope), k)
        dq[:, :, rows] = (dscores @ block_k.to(dtype)).view(queries.shape)
        dk[:, :, keys] += dscores.transpose(-1, -2) @ _group_heads(queries.to(dtype), k)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@torch.no_grad()
def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of full rows whose denominators also have the sink of their head; `sinks` is [H]."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


@torch.no_grad()
def sink_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, given out and lse with them, and the gradient of out."""
    delta = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)


PartialResult = tuple[Tensor, ...]
"""of some query rows: (out, lse), or (gradient,)"""


class _PartialAccumulator:
    """Accumulates partial results of query rows, several at a time.

    Each merge reads and writes the fp32 total, which costs more than reading a partial result. So small partial results
    wait; for large ones the GEMMs that make them take so much longer that it does not matter. Partial results may cover
    any rows.
    """

    def __init__(self, like: Tensor):
        self._like = like
        self._pending: list[tuple[slice, PartialResult]] = []
        self._total: PartialResult | None = None

    def _add(self, rows: slice, part: PartialResult) -> None:
        free = MAX_PENDING_BYTES - sum(pending[0].nbytes for _, pending in self._pending)
        if self._pending and (free < part[0].nbytes or len(self._pending) == MAX_PENDING):
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
            before = [_slice_rows(self._total, rows)] if self._total else []
            _combine_parts(_slice_rows(target, rows), [*parts, *before])
        return target

    def _row_ranges(self) -> Iterator[tuple[slice, list[PartialResult]]]:
        """Yield row ranges, each with the pending partial results that cover it."""
        edges = {0, self._like.shape[2]}.union(*((rows.start, rows.stop) for rows, _ in self._pending))
        for start, stop in pairwise(sorted(edges)):
            inside = [(rows.start, part) for rows, part in self._pending if rows.start <= start and stop <= rows.stop]
            yield slice(start, stop), [_slice_rows(part, slice(start - first, stop - first)) for first, part in inside]

    def _identity(self) -> PartialResult:
        raise NotImplementedError


class AttentionMerger(_PartialAccumulator):
    """Attention of q's rows to the added blocks of keys, in any order. See [Note: merging blocks by log-sum-exp]."""

    @torch.no_grad()
    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add the result of `attend(q[:, :, rows], ...)`, which may be read until `result` returns."""
        self._add(rows, (out, lse))

    @torch.no_grad()
    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse); 0 and -inf for rows without a block."""
        q = self._like
        empty_lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        out, lse = self._combine((_empty_tokens_first(q, q.dtype), empty_lse))
        return out, lse

    def _identity(self) -> PartialResult:
        q, dtype = self._like, accumulation_dtype(self._like.dtype)
        # Where lse is -inf, out is not read.
        return _empty_tokens_first(q, dtype), q.new_full(q.shape[:3], -inf, dtype=dtype)


class GradientAccumulator(_PartialAccumulator):
    """Sum of the blocks' contributions to the gradient of x (rows are dim 2), in fp32 or fp64."""

    @torch.no_grad()
    def add(self, rows: slice, part: Tensor) -> None:
        """Add a contribution to the gradient of x[:, :, rows], which may be read until `result` returns."""
        self._add(rows, (part,))

    @torch.no_grad()
    def result(self) -> Tensor:
        """Return the gradient in x's dtype; 0 for rows without a contribution."""
        return self._combine((_empty_tokens_first(self._like, self._like.dtype),))[0]

    def _identity(self) -> PartialResult:
        return (_empty_tokens_first(self._like, accumulation_dtype(self._like.dtype)).zero_(),)


@torch.no_grad()
def accumulate_(total: Tensor, part: Tensor) -> None:
    """Add `part` to a total in a wider dtype, in place."""
    _combine_parts((total,), [(total,), (part,)])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of this dtype accumulate in."""
    return torch.promote_types(dtype, torch.float32)


def _slice_rows(part: PartialResult, rows: slice) -> PartialResult:
    return tuple(x[:, :, rows] for x in part)


def _combine_parts(target: PartialResult, parts: list[PartialResult]) -> None:
    """Write the merged parts to `target`, which may be one of them."""
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
        lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
        base, total = _finite_lse(lse), torch.zeros_like(target[0], dtype=lse.dtype)
        for out, part_lse in parts:
            weight = (part_lse - base).exp_().unsqueeze(-1)
            total += torch.where(weight > 0, weight * out, 0.0)
        target[0].copy_(total)
        target[1].copy_(lse)


def _softmax_(scores: Tensor, lse: Tensor) -> Tensor:
    return scores.sub_(_finite_lse(lse).unsqueeze(-1)).exp_()


def _finite_lse(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that exp(-inf - lse) is 0."""
    return lse.masked_fill(lse == -inf, 0.0)


def _find_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scores: ScoreOptions
) -> sdpa_lse.SdpaKernel | None:
    """Torch's kernels have no caps, and no windows."""
    if scores.softcap is not None or scores.window is not None:
        return None
    return sdpa_lse.find_kernel(q, k, v, mask, causal, scores.scale)


def _scores(q: Tensor, k: Tensor, options: ScoreOptions, rows: slice, keys: slice) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    q, k = q[:, :, rows], k[:, :, keys]
    scores = _group_heads(q.to(dtype) * options.factor(q.shape[-1]), k) @ k.to(dtype).transpose(-1, -2)
    scores = scores.view(*q.shape[:3], k.shape[2])
    return scores if options.softcap is None else options.softcap * (scores / options.softcap).tanh()


def _hide_(
    scores: Tensor, masked: Tensor | None, causal: bool, window: int | None, rows: slice, keys: slice, shift: int
) -> None:
    """Set the scores of keys that a query does not attend to to -inf."""
    if causal or window is not None:
        row = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(-1) + shift
        key = torch.arange(keys.start, keys.stop, device=scores.device)
        if causal:
            scores.masked_fill_(key > row, -inf)
        if window is not None:
            scores.masked_fill_(key <= row - window, -inf)
    if masked is not None:
        scores.masked_fill_(masked, -inf)


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """View x [B, H, T, ...] as [B, KV, H / KV * T, ...]: the heads that share a kv head are rows of one matrix."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _mask_block(x: Tensor | None, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor | None:
    return None if x is None else x.expand(*q.shape[:3], k.shape[2])[:, :, rows, keys]


def _query_chunks(q: Tensor, k: Tensor, causal: bool, window: int | None, shift: int) -> Iterator[tuple[slice, slice]]:
    """Yield (query rows, the keys they may attend to)."""
    length, keys = q.shape[2], k.shape[2]
    step = max(MAX_SCORES // max(q.shape[0] * q.shape[1] * keys, 1), 1)
    if window is not None:
        step = min(step, max(window, MIN_WINDOW_ROWS))  # rows that share most of their keys
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = 0 if window is None else min(max(start + shift - window + 1, 0), keys)
        last = min(max(stop + shift, first), keys) if causal else keys
        yield slice(start, stop), slice(first, last)


def _empty_tokens_first(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate q's shape, in memory [B, Tq, H, D]: the heads of a token are one row for the output projection."""
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)


def _check_shapes(q: Tensor, k: Tensor, causal: bool, scores: ScoreOptions, shift: int) -> None:
    assert q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} kv heads"
    is_square = q.shape[2] == k.shape[2] and not shift
    assert not causal or is_square or scores.window is not None, (
        f"causal attention with {q.shape[2]} queries and {k.shape[2]} keys"
    )
