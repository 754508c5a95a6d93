"""Logits of a user's model that are computed when something reads them, so that their cross entropy needs none.

A custom model often ends in `F.cross_entropy(self.head(x).view(-1, V), targets.view(-1))`. The logits of all tokens are
its largest tensor by far, and the loss reads and writes them several times. So the head, a linear without bias outside
the layers, gives `DeferredLogits`, which hold its input. They can be reshaped, sliced by tokens and cast to a wider
dtype; `F.cross_entropy` of them is computed some tokens at a time by a kernel of ours. Anything else that reads them
computes them first, as does the end of the model's forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.layers.cross_entropy import IGNORE_INDEX, linear_cross_entropy
from echelon.models.foreign.causal_lm import derive_class
from echelon.models.layer_lists import listed_layers
from echelon.models.pipeline_model import is_within

MIN_WORDS = 4096
"""logits of fewer words are small"""


class DeferredLogits(Tensor):
    """The matmul of hidden states [..., d] and a head's weight [V, d], not computed yet."""

    hidden: Tensor
    weight: Tensor

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> DeferredLogits:
        logits: DeferredLogits = compat.tensor_without_storage(
            DeferredLogits, (*hidden.shape[:-1], len(weight)), dtype, hidden.device
        )
        logits.hidden, logits.weight = hidden, weight
        return logits

    def compute(self) -> Tensor:
        return F.linear(self.hidden, self.weight).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits{tuple(self.shape)}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        handler = HANDLERS.get(func)
        if handler is not None and isinstance(args[0] if args else None, DeferredLogits):
            result = handler(*args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*compute_all(args), **compute_all(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*compute_all(args), **compute_all(kwargs or {}))


def compute_all(values: Any) -> Any:
    """Return nested values with all logits computed."""
    return compat.map_nested(lambda value: value.compute() if isinstance(value, DeferredLogits) else value, values)


# -- what needs no logits: each handler returns None for arguments that it leaves to torch ----------------------------


def _reshape(logits: DeferredLogits, *sizes: Any) -> DeferredLogits | None:
    shape: Sequence[int] = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    words = logits.shape[-1]
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape):
        return None
    last = shape[-1] if shape[-1] != -1 else logits.numel() // max(math.prod(shape[:-1]), 1)
    if last != words:
        return None
    return DeferredLogits.of(logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]), logits.weight, logits.dtype)


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits | None:
    end = end_dim % logits.dim()
    if end == logits.dim() - 1:
        return None
    return DeferredLogits.of(logits.hidden.flatten(start_dim, end), logits.weight, logits.dtype)


def _slice(logits: DeferredLogits, index: Any) -> DeferredLogits | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(part, slice | EllipsisType) for part in parts) or parts.count(...) > 1:
        return None
    if ... in parts:
        place = parts.index(...)
        parts[place : place + 1] = [slice(None)] * (logits.dim() - len(parts) + 1)
    if len(parts) >= logits.dim() and parts[-1] != slice(None):
        return None
    return DeferredLogits.of(logits.hidden[tuple(parts[: logits.dim() - 1])], logits.weight, logits.dtype)


def _widen(logits: DeferredLogits, dtype: Any = torch.float32, **others: Any) -> DeferredLogits | None:
    if dtype is not torch.float32 or others:
        return None
    return DeferredLogits.of(logits.hidden, logits.weight, torch.float32)


def _unchanged(logits: DeferredLogits) -> DeferredLogits:
    return logits


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not is_plain or reduction not in ("mean", "sum") or target.is_floating_point() or logits.dim() != 2:
        return None
    is_ignored = target == ignore_index
    targets = target if ignore_index == IGNORE_INDEX else target.masked_fill(is_ignored, IGNORE_INDEX)
    device = logits.hidden.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        total = linear_cross_entropy(logits.hidden, logits.weight, targets)
    return total if reduction == "sum" else total / (~is_ignored).sum()


METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
}
"""what a tensor without storage answers itself"""
HANDLERS: dict[Any, Any] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    **dict.fromkeys((Tensor.float, Tensor.to), _widen),
    Tensor.__getitem__: _slice,
    Tensor.contiguous: _unchanged,
    F.cross_entropy: _cross_entropy,
}


# -- the head of a model ----------------------------------------------------------------------------------------------


class DeferringHead(nn.Module):
    """What `defer_logits` puts before the class of a head."""

    weight: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        if not (torch.is_grad_enabled() and has_kernel(hidden, dtype)):
            out: Tensor = super().forward(hidden)
            return out
        with torch.autocast(device, enabled=False):
            return DeferredLogits.of(hidden.to(dtype), self.weight.to(dtype), dtype)


def has_kernel(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a kernel of ours computes the cross entropy of logits in this dtype."""
    return hidden.is_cuda and hidden.numel() > 0 and dtype in dispatch.DTYPES and dispatch.triton_enabled()


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the only linear outside the layers with many outputs, if it has no bias and nothing was done to it."""
    layers = listed_layers(model)
    wide = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features >= max(MIN_WORDS, 2 * module.in_features)
        and not any(is_within(name, layer) for layer in layers)
    ]
    if len(wide) != 1 or not layers:
        return None
    head = wide[0]
    is_plain = type(head) is nn.Linear and head.bias is None and not compat.has_hooks_or_patched_forward(head)
    return head if is_plain else None


def defer_logits(model: nn.Module) -> None:
    """Let the head of a custom model defer its logits, if there is one."""
    head = find_head(model)
    if head is not None:
        derive_class(head, DeferringHead)
        model.register_forward_hook(lambda _module, _args, output: compute_all(output))
