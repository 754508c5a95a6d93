"""Linear layers that fuse their GEMMs, RMSNorm alone or with the residual addition, the LM head and its loss."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.gemm.fused_linear import PLAIN_GEMMS, LinearGemms, concat_view, project
from echelon.kernels.layers.cross_entropy import cross_entropy_sum, linear_cross_entropy
from echelon.kernels.layers.residual_norm import residual_layer_norm, residual_rms_norm, rms_norm
from echelon.models.model_config import IGNORE_INDEX, NORM_EPSILON


class Linear(nn.Linear):
    """A linear layer that our kernels compute, alone or fused with others of the same input."""

    gemms: LinearGemms = PLAIN_GEMMS
    """its GEMMs: plain, or in fp8 (precision/fp8_linear.py)"""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self)


def project_all(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Every layer's output. Layers with a method `together`, which reads x once, are called together."""
    together = getattr(layers[0], "together", None)
    if together is None or any(
        type(layer) is not type(layers[0]) or compat.has_hooks_or_patched_forward(layer) for layer in layers
    ):
        return tuple(layer(x) for layer in layers)
    outputs: tuple[Tensor, ...] = together(x, layers)
    return outputs


def can_fuse_gemm(x: Tensor, *layers: nn.Module) -> bool:
    """Whether the layers can run as one GEMM: on a GPU, without hooks or adapters, with adjacent weights and biases."""
    if not dispatch.use_triton(x) or not all(
        type(layer) is Linear and not compat.has_hooks_or_patched_forward(layer) for layer in layers
    ):
        return False
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and (len(biases) < len(linears) or concat_view(biases) is None):
        return False
    return concat_view([one.weight for one in linears]) is not None


class RMSNorm(nn.Module):
    recompute_output = False
    """backward recomputes the output instead of saving it (recompute=ops)"""

    def __init__(self, width: int, epsilon: float = NORM_EPSILON) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, recompute=self.recompute_output)


class ResidualRMSNorm(RMSNorm):
    """Residual addition and RMSNorm in one kernel."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(x + delta, RMSNorm(x + delta))"""
        return residual_rms_norm(x, delta, self.weight, self.epsilon, recompute=self.recompute_output)


class LayerNorm(nn.LayerNorm):
    recompute_output = False
    """backward recomputes the output instead of saving it (recompute=ops)"""

    def forward(self, input: Tensor) -> Tensor:
        return residual_layer_norm(input, None, self.weight, self.bias, self.eps, recompute=self.recompute_output)[1]


class ResidualLayerNorm(LayerNorm):
    """Residual addition and LayerNorm in one kernel."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(x + delta, LayerNorm(x + delta))"""
        return residual_layer_norm(x, delta, self.weight, self.bias, self.eps, recompute=self.recompute_output)


class LMHead(nn.Module):
    """The projection from hidden states to logits. A tied model replaces `weight` by the embedding's."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab, width))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(x, self.weight, targets), (targets != IGNORE_INDEX).sum()

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)  # keep_fp32 may hold the head in float32


def loss_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies (fp32, or fp64 for fp64 logits) and the number of valid targets (int64)."""
    return cross_entropy_sum(logits, targets), (targets != IGNORE_INDEX).sum()


INVALID_NUM_TARGETS = "the model's forward returned an invalid number of valid targets"
NUM_TARGETS_REMEDY = "return an integer, 0 or more, such as len(y)"


def _check_num_targets(count: Tensor) -> Tensor:
    """Refuse a negative or fractional number. On a device it becomes NaN, which the step's result reports late."""
    if count.numel() != 1 or count.is_complex():
        raise ValueError(f"{INVALID_NUM_TARGETS} (a tensor of shape {tuple(count.shape)}); {NUM_TARGETS_REMEDY}")
    if count.device.type == "cpu":
        number = count.item()
        if not (number >= 0 and float(number).is_integer()):
            raise ValueError(f"{INVALID_NUM_TARGETS} ({number:g}); {NUM_TARGETS_REMEDY}")
        return count
    is_valid = count >= 0
    if count.is_floating_point():
        is_valid = is_valid & (count == count.floor()) & (count < math.inf)
    return torch.where(is_valid, count.double(), math.nan)


def check_loss_output(output: object) -> tuple[Tensor, Tensor]:
    """The output of a model's forward, checked against the loss contract (sum of losses, number of valid targets)."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return output[0], _check_num_targets(torch.as_tensor(output[1]))
    actual = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ValueError(
        f"the model's forward must return (sum of losses, number of valid targets), got {actual}; "
        "return for instance F.cross_entropy(x, y, reduction='sum'), len(y)"
    )
