"""Embedding and cross-entropy with the vocabulary divided over tp: logits are never gathered.

A vocabulary that does not divide is padded at the end. No token has a padded id, padded logits are -inf (no
probability, hence no gradient), and padded rows start at zero, so they stay zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from echelon.parallel.axis import Axis
from echelon.parallel.regions import Boundary

IGNORED = -100


class VocabularyEmbedding(nn.Module):
    """Looks up the rows this rank holds; the sum over ranks has every row."""

    def __init__(self, weight: nn.Parameter, boundary: Boundary):
        super().__init__()
        self.weight, self.boundary, self.axis = weight, boundary, boundary.axis

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = ids - self.axis.index * rows
        elsewhere = (local < 0) | (local >= rows)
        out = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.boundary.leave(out.masked_fill(elsewhere[..., None], 0.0))


class VocabularyHead(nn.Module):
    """The language head: hidden states to (loss sum, count) without any rank holding all logits."""

    def __init__(self, weight: nn.Parameter, boundary: Boundary, vocabulary: int):
        super().__init__()
        self.weight, self.boundary, self.axis, self.vocabulary = weight, boundary, boundary.axis, vocabulary

    def _local_logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(self.boundary.enter(hidden), self.weight)
        rows = self.weight.shape[0]
        real = min(max(self.vocabulary - self.axis.index * rows, 0), rows)
        if real < rows:
            padded = torch.arange(rows, device=logits.device) >= real
            logits = logits.masked_fill(padded, float("-inf"))
        return logits

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._local_logits(hidden)
        count = (targets != IGNORED).sum()
        losses: Tensor = _CrossEntropy.apply(logits, targets, self.axis)
        return losses.sum(), count

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits, gathered: for text samples, not for training."""
        local = self._local_logits(hidden)
        whole = local.new_empty(self.axis.size, *local.shape)
        self.axis.start_all_gather(whole.view(-1), local.contiguous().view(-1)).wait()
        return torch.cat(whole.unbind(0), dim=-1)[..., : self.vocabulary]


class _CrossEntropy(Function):
    """Losses from a slice of the logits. Two collectives: the maximum, then (sum of exponentials, target's logit)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if exact is logits:
            exact = logits.clone()
        largest = axis.all_reduce(exact.amax(dim=-1), op="max")
        exact -= largest[..., None]
        rows = logits.shape[-1]
        local = targets - axis.index * rows
        valid = targets != IGNORED
        here = (local >= 0) & (local < rows) & valid
        local = local.masked_fill(~here, 0)
        target = exact.gather(-1, local[..., None])[..., 0].masked_fill(~here, 0.0)
        exact.exp_()
        total, target = axis.all_reduce(torch.stack([exact.sum(dim=-1), target]))
        exact /= total[..., None]
        ctx.save_for_backward(exact, local, here, valid)
        ctx.dtype = logits.dtype
        losses: Tensor = (total.log() - target).masked_fill(~valid, 0.0)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, here, valid = ctx.saved_tensors
        scale = gradients[0].masked_fill(~valid, 0.0)
        out = probabilities * scale[..., None]
        out.scatter_add_(-1, local[..., None], (-scale * here)[..., None].to(out.dtype))
        return out.to(ctx.dtype), None, None
