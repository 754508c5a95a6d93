"""Cross-entropy of logits whose vocabulary is sharded over tp: the logits are never gathered.

A vocabulary that tp does not divide is padded at the end. No token has a padded id, padded logits are left out (no
probability, hence no gradient), and padded rows start at zero, so they stay zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.kernels.layers.cross_entropy import IGNORE_INDEX
from echelon.parallel.comm.mesh_axis import MeshAxis


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: MeshAxis, vocab_size: int) -> Tensor:
    """Return the loss of each target from this rank's logits [..., rows]; padding follows the vocabulary."""
    rows = logits.shape[-1]
    unpadded = min(max(vocab_size - axis.index * rows, 0), rows)
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, axis, unpadded, vocab_size)
    return losses


class _VocabParallelCrossEntropy(Function):
    """Cross-entropy from slices of the logits, with one small all-gather.

    1. Each rank: softmax over its unpadded logits, and their log-sum-exp, `lse`.
    2. All-gather (lse, the target's logit or 0): `total` = log-sum-exp of all `lse`; the loss is total - target.
    3. Backward: a probability over the full vocabulary is the rank's probability times exp(lse - total).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: MeshAxis, unpadded: int, vocab_size: int) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        local = targets - axis.index * logits.shape[-1]
        valid = targets != IGNORE_INDEX
        is_local = (local >= 0) & (local < unpadded) & valid
        local = local.masked_fill(~is_local, 0)
        # An invalid target fails the lookup below, as it does on one device: no rank holds such a row.
        local = local.masked_fill(valid & ((targets < 0) | (targets >= vocab_size)), logits.shape[-1])
        numbers = torch.zeros(2, *targets.shape, dtype=exact, device=logits.device)
        probabilities = torch.softmax(logits[..., :unpadded], dim=-1, dtype=exact)
        numbers[1] = logits.gather(-1, local[..., None])[..., 0].to(exact).masked_fill(~is_local, 0.0)
        if unpadded:
            # The largest probability is at least 1 / vocab_size, so its logarithm is exact enough.
            numbers[0] = logits[..., :unpadded].amax(dim=-1).to(exact) - probabilities.amax(dim=-1).log()
        else:
            numbers[0] = float("-inf")
        gathered = axis.all_gather(numbers)
        total = gathered[:, 0].logsumexp(dim=0)
        ctx.save_for_backward(probabilities, (numbers[0] - total).exp_(), local, is_local, valid)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return (total - gathered[:, 1].sum(dim=0)).masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, rescale, local, is_local, valid = ctx.saved_tensors
        unpadded = probabilities.shape[-1]
        scale = gradients[0].masked_fill(~valid, 0.0)
        out = torch.empty(ctx.shape, dtype=ctx.dtype, device=probabilities.device)
        out[..., unpadded:].zero_()
        torch.mul(probabilities, (rescale * scale)[..., None], out=out[..., :unpadded])
        if unpadded:
            out.scatter_add_(-1, local[..., None], (-scale * is_local)[..., None].to(ctx.dtype))
        return out, None, None, None, None


def local_row_index(ids: Tensor, first: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return (index among the rows first .. first + count - 1 of a table, or 0; whether the row is remote).

    An invalid id gets an index out of range, which fails the lookup, as it does on one device.
    """
    local = ids - first
    is_remote = ((local < 0) | (local >= count)) & (ids >= 0) & (ids < size)
    return local.masked_fill(is_remote, 0), is_remote
