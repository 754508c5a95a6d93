"""What parameters and buffers hold before the first step, made on each rank for its own pieces alone.

A parameter that the model came with is sliced. One on the meta device is drawn from counter-based numbers by the
model's own recipe `initial(name)`, so that no rank ever holds a whole large model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon import rng
from echelon.layout.placement import Piece

CHUNK = 1 << 22
"""elements whose first values are drawn at a time"""


def first_values(model: nn.Module, *, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[Piece], Tensor]:
    """A function from a piece to its first values."""
    given = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.is_meta}
    recipe: Any = getattr(model, "initial", None)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta and recipe is None]
    if missing:
        raise ValueError(
            f"parameters on the meta device need a method `initial(name)` ({type(model).__name__}: {missing[0]}, ...)"
        )

    def values(piece: Piece) -> Tensor:
        entry = piece.entry
        if entry.name in given:
            part = given[entry.name][tuple(slice(low, high) for low, high in piece.box)]
            padded = part.new_zeros(entry.local_shape)
            padded[tuple(slice(0, size) for size in part.shape)] = part
            return padded.reshape(-1)[piece.start : piece.stop]
        out = torch.zeros(piece.stop - piece.start, dtype=dtype, device=device)
        init: rng.Init = recipe(entry.name)
        window = {dim: (low, entry.shape[dim]) for dim, (low, _) in enumerate(piece.box)}
        for start, stop in piece.runs():
            for first in range(start, stop, CHUNK):
                last = min(first + CHUNK, stop)
                index = rng.logical_index(entry.local_shape, window, first, last, device)
                out[first - piece.start : last - piece.start] = init.values(seed, entry.name, index, dtype)
        return out

    return values


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Buffers (running statistics, tables) are whole on every rank, in the compute type or what a module asks for."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            wide = name in getattr(module, "wide_buffers", ())
            target = torch.promote_types(dtype, torch.float32) if wide else dtype
            target = target if buffer.is_floating_point() else buffer.dtype
            if buffer.is_meta:
                made = torch.zeros(buffer.shape, dtype=target, device=device)
                if name == "running_var":
                    made.fill_(1.0)
                setattr(module, name, made)
            else:
                setattr(module, name, buffer.to(device, target))
