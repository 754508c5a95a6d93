"""The language head of a transformers model, and what its forward does with the head's output: scales, caps, casts.

`LogitMap` is what a trial found. Where the map acts on every logit alone, the loss is computed chunk by chunk, and a
rank of tensor parallelism maps its slice of the vocabulary: no family is named, and no code of one is repeated. Where
it acts on the vocabulary as a whole, chunks of tokens hold all logits; where tokens meet, all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.kernels import dispatch
from echelon.kernels.layers.cross_entropy import (
    TokenLosses,
    chunked_linear_loss,
    linear_cross_entropy,
    token_cross_entropy,
)
from echelon.kernels.memory_limits import TORCH_LOGIT_BYTES, tokens_per_chunk
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.layer_stack import LayerStack

TOLERANCE = 1e-12
"""vectorised and scalar code of a function may differ in the last bit"""


@dataclass(frozen=True)
class LogitMap:
    """What a forward does with the output of its head."""

    is_identity: bool = False
    divides_tokens: bool = False
    """the logits of a token follow from the head's output for that token"""
    divides_vocab: bool = False
    """each logit follows from the head's output for that word"""


class LanguageHead(nn.Module):
    """What `adapt` puts before the class of a linear head."""

    weight: Tensor
    bias: Tensor | None
    gather: Callable[[Tensor], Tensor] | None = None
    """from this rank's logits to all, where the model's map needs them; tensor parallelism sets it"""
    gathered_words: int = 0
    chunk_tokens: int | None = None
    """tokens whose logits are held at a time; none: as many as fit into a fixed memory"""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, losses: TokenLosses | None = None) -> Tensor:
        """The logits; with `targets`, the sum of the losses, of which `losses` computes some tokens at a time."""
        if targets is None or losses is None:
            return self._gather(super().forward(hidden))
        if not dispatch.autocast_enabled(hidden):
            return self._sum_losses(hidden, self.weight, self.bias, targets, losses)
        device, bias = hidden.device.type, self.bias
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):  # autograd functions of ours choose their dtypes themselves
            bias = None if bias is None else bias.to(dtype)
            return self._sum_losses(hidden.to(dtype), self.weight.to(dtype), bias, targets, losses)

    def _sum_losses(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, losses: TokenLosses
    ) -> Tensor:
        is_plain = losses is token_cross_entropy and bias is None and self.gather is None
        if is_plain and weight.dtype == hidden.dtype and dispatch.use_triton(hidden):
            return linear_cross_entropy(hidden, weight, targets)
        words = self.gathered_words or weight.shape[0]
        return chunked_linear_loss(
            *(hidden, weight, bias, targets),
            lambda logits, some: losses(self._gather(logits), some),
            chunk_tokens=self.chunk_tokens or tokens_per_chunk(words, TORCH_LOGIT_BYTES),
        )

    def _gather(self, logits: Tensor) -> Tensor:
        return logits if self.gather is None else self.gather(logits)


def try_logit_map(model: Any, stack: LayerStack) -> LogitMap:
    """Find what a model does with random logits, whole and in slices. Its buffers must have values."""
    generator = torch.Generator().manual_seed(3)
    words = model.get_parameter(f"{stack.head_name}.weight").shape[0]
    logits = 4.0 * torch.randn(2, 3, words, dtype=torch.float64, generator=generator)
    cut = words // 2

    def run(some: Tensor) -> Tensor:
        return stack.finish_logits(model, some)

    def agrees(parts: Callable[[], Tensor], whole: Tensor) -> bool:
        try:
            found = parts()
        except Exception:  # whatever a model's code raises for fewer words or tokens than it expects
            return False
        return found.shape == whole.shape and torch.allclose(found, whole, rtol=TOLERANCE, atol=TOLERANCE)

    with torch.no_grad(), float64_casts(torch.float64):
        try:
            whole = run(logits)
        except Exception:  # the class does more after its head than a forward without layers can do
            return LogitMap()
        return LogitMap(
            is_identity=whole.shape == logits.shape and torch.equal(whole, logits),
            divides_tokens=agrees(lambda: run(logits.view(6, 1, words)).view(2, 3, -1), whole),
            divides_vocab=agrees(lambda: torch.cat([run(logits[..., :cut]), run(logits[..., cut:])], dim=-1), whole),
        )
