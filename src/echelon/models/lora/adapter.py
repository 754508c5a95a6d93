"""`LoRAAdapter`: a product of two narrow matrices beside a frozen linear (Hu et al. 2021).

[Note: beside, not around]

    y = x W^T + bias + scale (dropout(x) A^T) B^T         A [rank, in]    B [out, rank], zero at first

The linear stays where it is, with its class and its parameters' names: tensor parallelism, Hugging Face weights and
kernels find what they know. It gets a child `lora`, and a class before its own whose forward adds the adapter's output.
A fused linear (models/foreign/unfuse.py) has one A, and a B for each of its parts, which tensor parallelism divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon import rng
from echelon.models.foreign.unfuse import FusedLinear, output_dim
from echelon.models.lora.lora_options import LoRAOptions

ADAPTER = "lora"
"""the name of an adapter in its linear"""
TRIAL_STD = 0.05
"""standard deviation of B where zeros would hide A: its first gradient is that of zero"""


@dataclass(frozen=True)
class UniformInit(rng.Init):
    """Uniform in [-bound, bound)."""

    distribution: str = "uniform"
    bound: float = 1.0

    def values(self, seed: int, name: str, index: Tensor, dtype: torch.dtype) -> Tensor:
        return ((2 * rng.uniform(rng.key(seed, name), index) - 1) * self.bound).to(dtype)


class LoRAAdapter(nn.Module):
    """The adapter of one linear, or of a fused one."""

    def __init__(self, linear: nn.Module, options: LoRAOptions, *, zero_b: bool = True):
        """Without `zero_b`, B starts at random: a test of one step then sees the gradient of A."""
        super().__init__()
        parts: list[Any] = linear.parts if isinstance(linear, FusedLinear) else [linear]
        self.output_dim = output_dim(parts[0])
        """the dimension of the linear's weight that its outputs have"""
        weight = parts[0].weight
        outputs = [part.weight.shape[self.output_dim] for part in parts]
        like = {"device": weight.device, "dtype": weight.dtype}
        self.A = nn.Parameter(torch.empty(options.rank, weight.shape[1 - self.output_dim], **like))
        self.B = nn.ParameterList(torch.empty(size, options.rank, **like) for size in outputs)
        self.dropout = nn.Dropout(options.dropout)
        self.scale, self._zero_b = options.scale, zero_b

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self._drop(x), self.A) * self.scale
        outputs = [F.linear(low, part) for part in self.B]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _drop(self, x: Tensor) -> Tensor:
        """Drop values of [rows, tokens, ...], also where a layer has made one dimension of both."""
        stream = getattr(self.dropout, "stream", None)
        rows = len(stream.samples) if stream is not None and stream.samples is not None else len(x)
        is_flat = len(x) != rows and len(x) % rows == 0
        out: Tensor = self.dropout(x.unflatten(0, (rows, -1)) if is_flat else x)
        return out.flatten(0, 1) if is_flat else out

    def initial(self, attribute: str) -> rng.Init:
        """Initial distribution of a parameter: A as a linear's weight, B zero."""
        if attribute == "A":
            return UniformInit(bound=1 / math.sqrt(self.A.shape[1]))
        return rng.ZEROS if self._zero_b else rng.normal_init(TRIAL_STD)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}"


class AdaptedLinear(nn.Module):
    """What `attach_adapter` puts before the class of a linear."""

    lora: LoRAAdapter

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.lora(x)
        return out


def attach_adapter(linear: nn.Module, adapter: LoRAAdapter) -> None:
    own = type(linear)
    linear.add_module(ADAPTER, adapter)
    linear.__class__ = type(own.__name__, (AdaptedLinear, own), {"__module__": own.__module__})


def remove_adapters(model: nn.Module) -> nn.Module:
    """Give the linears of a model their own classes again, in place."""
    for module in list(model.modules()):
        if isinstance(module, AdaptedLinear):
            del module._modules[ADAPTER]
            module.__class__ = type(module).__bases__[1]
    return model


def iter_adapters(model: nn.Module) -> Iterator[tuple[str, LoRAAdapter]]:
    """Yield the adapters of a model, each with the name of its linear."""
    for name, module in model.named_modules():
        if isinstance(module, LoRAAdapter):
            yield name.rpartition(".")[0], module


def adapter_inits(model: nn.Module) -> dict[str, rng.Init]:
    """Return the initial distribution of every adapter parameter by name."""
    return {
        f"{linear}.{ADAPTER}.{attribute}": adapter.initial(attribute)
        for linear, adapter in iter_adapters(model)
        for attribute, _ in adapter.named_parameters()
    }


def adapted_names(model: nn.Module) -> Sequence[str]:
    """Return the names of all linears with adapters."""
    return [name for name, _ in iter_adapters(model)]
