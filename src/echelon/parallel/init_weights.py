"""Initial weights and buffers, created on each rank for its own pieces alone.

A parameter that the model came with is sliced. One on the meta device is read from the model's `stored` tensors, or
drawn from counter-based random numbers by the model's method `initial(name)`, so that no rank ever holds a large model
unsharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from echelon import rng
from echelon.layout.placement import Piece
from echelon.models.lora.adapter import adapter_inits
from echelon.parallel.parallel_options import ParallelOptions

RNG_CHUNK = 1 << 22
"""elements drawn at a time"""


def initial_values(model: nn.Module, options: ParallelOptions) -> Callable[[Piece], Tensor]:
    """Return a function from a piece to its initial values."""
    # Master weights in 16 bits are rounded from the same values that float32 ones would hold.
    device, dtype = options.device, torch.promote_types(options.master_dtype, torch.float32)
    given = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.is_meta}
    recipe: Any = getattr(model, "initial", None)
    adapters = adapter_inits(model)
    stored: Mapping[str, Any] = getattr(model, "weight_source", None) or {}
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    missing = [name for name in on_meta if recipe is None and name not in stored and name not in adapters]
    if missing:
        raise ValueError(
            f"parameters on the meta device need a method `initial(name)` ({type(model).__name__}: {missing[0]}, ...)"
        )

    def values(piece: Piece) -> Tensor:
        param = piece.param
        if param.name in given:
            local = given[param.name][tuple(slice(low, high) for low, high in piece.box)]
            return _padded(local, param.local_shape)[piece.start : piece.stop]
        if param.name in stored:
            return _read_piece(stored[param.name], piece).to(device, dtype)
        out = torch.zeros(piece.stop - piece.start, dtype=dtype, device=device)
        init: rng.Init = adapters.get(param.name) or recipe(param.name)
        window = {dim: (low, param.shape[dim]) for dim, (low, _) in enumerate(piece.box)}
        for start, stop in piece.unpadded_runs():
            for first in range(start, stop, RNG_CHUNK):
                last = min(first + RNG_CHUNK, stop)
                index = rng.logical_index(param.local_shape, window, first, last, device)
                out[first - piece.start : last - piece.start] = init.values(options.seed, param.name, index, dtype)
        return out

    return values


def _padded(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x in a larger shape, padded with zeros, flat."""
    padded = x.new_zeros(tuple(shape))
    padded[tuple(slice(0, size) for size in x.shape)] = x
    return padded.reshape(-1)


def _read_piece(stored: Any, piece: Piece) -> Tensor:
    """Read a piece of a sliceable tensor: its elements alone, as full rows and parts of the first and the last."""
    local, box = piece.param.local_shape, piece.box

    def interval(start: int, stop: int, at: tuple[int, ...]) -> list[Tensor]:
        """Read elements start .. stop - 1 of the local tensor at these leading indices."""
        if start >= stop:
            return []
        dim = len(at)
        row = math.prod(local[dim + 1 :])
        first, last = -(-start // row), stop // row
        if first > last:
            return interval(start - last * row, stop - last * row, (*at, last))
        head = interval(start - (first - 1) * row, row, (*at, first - 1)) if start < first * row else []
        tail = interval(0, stop - last * row, (*at, last)) if last * row < stop else []
        return [*head, *rows(at, first, last), *tail]

    def rows(at: tuple[int, ...], first: int, last: int) -> list[Tensor]:
        low, high = box[len(at)]
        outside = any(index >= end - begin for index, (begin, end) in zip(at, box, strict=False))
        ends = (low + first, max(low + first, min(low + last, high)))
        shape = (last - first, *local[len(at) + 1 :])
        if first == last:
            return []
        if outside or ends[0] == ends[1]:
            return [torch.zeros(math.prod(shape))]  # padding
        index_slices = [slice(begin + index, begin + index + 1) for index, (begin, _) in zip(at, box, strict=False)]
        part: Tensor = stored[(*index_slices, slice(*ends), *(slice(*others) for others in box[len(at) + 1 :]))]
        return [_padded(part.reshape(part.shape[len(at) :]), shape)]

    parts = interval(piece.start, piece.stop, ())
    return torch.cat(parts) if parts else torch.zeros(0)


def move_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype, fp32_modules: Set[str] = frozenset()
) -> None:
    """Move buffers (running statistics, tables) to the device, unsharded, in the compute dtype or the module's own.

    Buffers of `fp32_modules` are at least float32.
    """
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            keeps_fp32 = path in fp32_modules or name in getattr(module, "wide_buffers", ())
            target = torch.promote_types(dtype, torch.float32) if keeps_fp32 else dtype
            target = target if buffer.is_floating_point() else buffer.dtype
            if buffer.is_meta:
                value = 1.0 if name == "running_var" else 0.0
                setattr(module, name, torch.full(buffer.shape, value, dtype=target, device=device))
            else:
                setattr(module, name, buffer.to(device, target))
