"""The end of a language model: logits, and the loss contract (sum of losses, number of valid targets)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels.layers.cross_entropy import cross_entropy_sum, linear_cross_entropy
from echelon.models.model_config import IGNORE_INDEX


def loss_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies (fp32, or fp64 for fp64 logits) and the number of valid targets (int64)."""
    return cross_entropy_sum(logits, targets), (targets != IGNORE_INDEX).sum()


def check_loss_output(output: object) -> tuple[Tensor, Tensor]:
    """The output of a model's forward, checked against the loss contract."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return output[0], torch.as_tensor(output[1])
    actual = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ValueError(
        f"the model's forward must return (sum of losses, number of valid targets), got {actual}; "
        "return for instance F.cross_entropy(x, y, reduction='sum'), len(y)"
    )


class LMHead(nn.Module):
    """The projection from hidden states to logits. A tied model replaces `weight` by the embedding's."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab, width))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(x, self.weight, targets), (targets != IGNORE_INDEX).sum()

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)  # keep_fp32 may hold the head in float32
