"""Layers sharded over tp: row-parallel linear, vocabulary-parallel embedding and language head.

Column-parallel linears are plain linears with fewer outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.kernels.gemm.fused_linear import PLAIN_GEMMS, LinearGemms, fused_linear
from echelon.kernels.layers.cross_entropy import IGNORE_INDEX
from echelon.parallel.tp.tp_collectives import RegionBoundary
from echelon.parallel.tp.vocab_cross_entropy import local_row_index, vocab_parallel_cross_entropy


class RowLinear(nn.Module):
    """A linear whose inputs are sharded over tp: each rank's GEMM gives a partial sum."""

    bias: nn.Parameter | None
    gemms: LinearGemms = PLAIN_GEMMS

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, boundary: RegionBoundary):
        super().__init__()
        self.weight, self.boundary = weight, boundary
        self.register_parameter("bias", bias)
        self.lora: nn.Module | None = None
        """an adapter whose inputs are sharded too: its output is a partial sum"""

    def forward(self, x: Tensor) -> Tensor:
        y = fused_linear(x, (self.weight,), (None,), self.gemms)
        y = self.boundary.leave(y if self.lora is None else y + self.lora(x))
        return y if self.bias is None else y + self.bias  # after the reduction: the bias is added once


class VocabParallelEmbedding(nn.Module):
    """An embedding that looks up the rows this rank holds; the sum over ranks has every row."""

    def __init__(self, weight: nn.Parameter, boundary: RegionBoundary, vocab_size: int):
        super().__init__()
        self.weight, self.boundary, self.axis, self.vocab_size = weight, boundary, boundary.axis, vocab_size

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local, is_remote = local_row_index(ids, self.axis.index * rows, rows, self.vocab_size)
        return self.boundary.leave(F.embedding(local, self.weight).masked_fill(is_remote[..., None], 0.0))


class VocabParallelHead(nn.Module):
    """The language head: hidden states to (loss sum, count), with the logits sharded."""

    def __init__(self, weight: nn.Parameter, boundary: RegionBoundary, vocab_size: int):
        super().__init__()
        self.weight, self.boundary, self.axis, self.vocab_size = weight, boundary, boundary.axis, vocab_size

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(self.boundary.enter(hidden), self.weight)
        losses = vocab_parallel_cross_entropy(logits, targets, self.axis, self.vocab_size)
        return losses.sum(), (targets != IGNORE_INDEX).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits, gathered: for text samples, not for training."""
        local = F.linear(self.boundary.enter(hidden.to(self.weight.dtype)), self.weight)
        return torch.cat(self.axis.all_gather(local).unbind(0), dim=-1)[..., : self.vocab_size]
