"""Linears whose output a layer cuts into parts (q, k and v; gate and up), as linears of their own.

A rank of tensor parallelism holds some columns of each part, which are no contiguous part of the fused weight. So
each part becomes a parameter: `qkv_proj.weight` is `qkv_proj.0.weight`, `.1.weight`, `.2.weight`. That a layer cuts an
output shows when it runs once without values (layer_probe.py): as a split, chunks or slices of its last dimension.
Outputs that interleave their parts by heads are not cut so, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.rng import Init


class FusedLinear(nn.ModuleList):
    """Linears of one input, whose outputs follow one another."""

    @property
    def parts(self) -> list[nn.Module]:
        """The linears; an adapter may be beside them."""
        return [module for name, module in self.named_children() if name.isdigit()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix and a bias: torch's linear, or transformers' with a transposed weight."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def output_dim(module: nn.Module) -> int:
    """The dimension of a linear's weight that its outputs have."""
    return 1 if is_transposed(module) else 0


class RecordCuts(TorchFunctionMode):
    """Records how the outputs of linears are cut along their last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, tuple[str, Tensor]] = {}
        self.cuts: dict[str, set[tuple[int, int]]] = {}

    def track(self, name: str, output: Tensor) -> None:
        self.outputs[id(output)] = (name, output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if args and id(args[0]) in self.outputs:
            name, output = self.outputs[id(args[0])]
            parts = out if isinstance(out, tuple | list) else (out,)
            cuts = func in (Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.__getitem__)
            if cuts and all(isinstance(p, Tensor) and p.shape[:-1] == output.shape[:-1] for p in parts):
                starts = [part.storage_offset() for part in parts]
                found = {(start, start + part.shape[-1]) for start, part in zip(starts, parts, strict=True)}
                self.cuts.setdefault(name, set()).update(found)
        return out

    def parts(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the parts of each output that is cut into all of its columns."""
        sizes = {}
        for name, cuts in self.cuts.items():
            ordered = sorted(cuts)
            widths = next(output.shape[-1] for other, output in self.outputs.values() if other == name)
            ends = [0, *(stop for _, stop in ordered)]
            if len(ordered) > 1 and [start for start, _ in ordered] == ends[:-1] and ends[-1] == widths:
                sizes[name] = tuple(stop - start for start, stop in ordered)
        return sizes


@dataclass(frozen=True)
class PartOf:
    """Where a part lies in the fused parameter."""

    name: str
    """of the fused parameter"""
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]
    """of the fused parameter"""


def unfuse(model: nn.Module, sizes: Mapping[str, Sequence[int]]) -> dict[str, PartOf]:
    """Replace fused linears by their parts. Return, for each new parameter, the fused one it is a part of."""
    parts: dict[str, PartOf] = {}
    for name, widths in sizes.items():
        module: Any = model.get_submodule(name)
        dim, start, pieces = output_dim(module), 0, []
        for index, width in enumerate(widths):
            pieces.append(_part(module, dim, start, start + width))
            for attribute, tensor in module.named_parameters(recurse=False):
                cut = PartOf(f"{name}.{attribute}", dim if tensor.dim() > 1 else 0, start, start + width, tensor.shape)
                parts[f"{name}.{index}.{attribute}"] = cut
            start += width
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, FusedLinear(pieces).train(module.training))
    return parts


def _part(module: Any, dim: int, start: int, stop: int) -> nn.Module:
    """A linear of some of the outputs, with copies of their weights."""
    width, size = stop - start, module.weight.shape[1 - dim]
    bias = module.bias is not None
    with torch.device("meta"):
        part: Any = type(module)(width, size) if dim else nn.Linear(size, width, bias=bias)
    for attribute, tensor in module.named_parameters(recurse=False):
        along = dim if tensor.dim() > 1 else 0
        values = tensor.detach().narrow(along, start, width).clone()
        setattr(part, attribute, nn.Parameter(values, requires_grad=tensor.requires_grad))
    made: nn.Module = part
    return made


@dataclass(frozen=True)
class PartInit(Init):
    """The first values of a part: those of the fused parameter at its place."""

    distribution: str = "part"
    fused: Init = field(default_factory=lambda: Init(distribution="zeros"))
    part: PartOf = field(default_factory=lambda: PartOf("", 0, 0, 0, ()))

    def values(self, seed: int, name: str, index: Tensor, dtype: torch.dtype) -> Tensor:
        part = self.part
        inner = 1 if part.dim == len(part.shape) - 1 else part.shape[-1]
        width = (part.stop - part.start) * inner
        row, column = index // width, index % width
        return self.fused.values(
            seed, part.name, row * part.shape[part.dim] * inner + part.start * inner + column, dtype
        )


@dataclass(frozen=True)
class PartTensor:
    """A part of a fused tensor on disk, whose slices can be read."""

    fused: Any
    part: PartOf

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part, slices = self.part, list(index)
        low, high = slices[part.dim].start or 0, slices[part.dim].stop
        high = part.stop - part.start if high is None else min(high, part.stop - part.start)
        slices[part.dim] = slice(part.start + low, part.start + high)
        out: Tensor = self.fused[tuple(slices)]
        return out
