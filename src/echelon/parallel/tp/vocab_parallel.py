"""Embedding and cross-entropy with the vocabulary divided over tp: logits are never gathered.

A vocabulary that does not divide is padded at the end. No token has a padded id, padded logits are left out (no
probability, hence no gradient), and padded rows start at zero, so they stay zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from echelon.kernels.layers.cross_entropy import IGNORE_INDEX
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp.tp_collectives import RegionBoundary


class VocabParallelEmbedding(nn.Module):
    """Looks up the rows this rank holds; the sum over ranks has every row."""

    def __init__(self, weight: nn.Parameter, boundary: RegionBoundary, vocab_size: int):
        super().__init__()
        self.weight, self.boundary, self.axis, self.vocab_size = weight, boundary, boundary.axis, vocab_size

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = ids - self.axis.index * rows
        # An id that is no token is not hidden: the look-up fails, as it does on one device.
        elsewhere = ((local < 0) | (local >= rows)) & (ids >= 0) & (ids < self.vocab_size)
        out = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.boundary.leave(out.masked_fill(elsewhere[..., None], 0.0))


class VocabParallelHead(nn.Module):
    """The language head: hidden states to (loss sum, count) without any rank holding all logits."""

    def __init__(self, weight: nn.Parameter, boundary: RegionBoundary, vocab_size: int):
        super().__init__()
        self.weight, self.boundary, self.axis, self.vocab_size = weight, boundary, boundary.axis, vocab_size

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(self.boundary.enter(hidden), self.weight)
        return vocab_parallel_cross_entropy(logits, targets, self.axis, self.vocab_size).sum(), (
            targets != IGNORE_INDEX
        ).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits, gathered: for text samples, not for training."""
        local = F.linear(self.boundary.enter(hidden.to(self.weight.dtype)), self.weight)
        whole = local.new_empty(self.axis.size, *local.shape)
        self.axis.start_all_gather(whole.view(-1), local.view(-1)).wait()
        return torch.cat(whole.unbind(0), dim=-1)[..., : self.vocab_size]


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: MeshAxis, vocab_size: int) -> Tensor:
    """The loss of each target, from this rank's slice of the logits [..., rows]; padding follows the vocabulary."""
    rows = logits.shape[-1]
    real = min(max(vocab_size - axis.index * rows, 0), rows)
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, axis, real, vocab_size)
    return losses


class _VocabParallelCrossEntropy(Function):
    """Losses from slices of the logits, with one small all-gather.

    1. Each rank: softmax over its own real logits, and their logarithm of the sum of exponentials, `own`.
    2. All-gather (own, the target's logit or 0): `total` = log sum exp of all `own`; the loss is total - target.
    3. Backward: a probability over the whole vocabulary is the rank's probability times exp(own - total).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: MeshAxis, real: int, vocabulary: int) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        local = targets - axis.index * logits.shape[-1]
        valid = targets != IGNORE_INDEX
        here = (local >= 0) & (local < real) & valid
        local = local.masked_fill(~here, 0)
        # A target that is no token is not hidden either: no rank has such a row, and the look-up below fails.
        local = local.masked_fill(valid & ((targets < 0) | (targets >= vocabulary)), logits.shape[-1])
        numbers = torch.zeros(2, *targets.shape, dtype=exact, device=logits.device)
        probabilities = torch.softmax(logits[..., :real], dim=-1, dtype=exact)
        numbers[1] = logits.gather(-1, local[..., None])[..., 0].to(exact).masked_fill(~here, 0.0)
        if real:
            # The largest probability is at least 1 / vocabulary, so its logarithm is exact enough to go back from.
            numbers[0] = logits[..., :real].amax(dim=-1).to(exact) - probabilities.amax(dim=-1).log()
        else:
            numbers[0] = float("-inf")
        everyone = numbers.new_empty(axis.size, *numbers.shape)
        axis.start_all_gather(everyone.view(-1), numbers.view(-1)).wait()
        total = everyone[:, 0].logsumexp(dim=0)
        ctx.save_for_backward(probabilities, (numbers[0] - total).exp_(), local, here, valid)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return (total - everyone[:, 1].sum(dim=0)).masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, share, local, here, valid = ctx.saved_tensors
        real = probabilities.shape[-1]
        scale = gradients[0].masked_fill(~valid, 0.0)
        out = torch.empty(ctx.shape, dtype=ctx.dtype, device=probabilities.device)
        out[..., real:].zero_()
        torch.mul(probabilities, (share * scale)[..., None], out=out[..., :real])
        if real:
            out.scatter_add_(-1, local[..., None], (-scale * here)[..., None].to(ctx.dtype))
        return out, None, None, None, None
