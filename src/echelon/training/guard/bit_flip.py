"""`--inject flip:rank=1,step=5,layer=...`: one bit of what a module gives, or of a gradient, is wrong once."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from echelon.faults import injector
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.param_group import FlatUnit
from echelon.parallel.dp.sharded_model import tensors_in
from echelon.training.guard.module_outputs import modules_of
from echelon.training.guard.step_checksums import WORDS

HIGHEST = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}
"""the highest bit behind the point: the number changes by at most a half, so nothing else notices"""


def arm(parallel: Parallel) -> None:
    """Where such a fault was asked for on this rank."""
    wanted = injector.flips_wanted()
    if not wanted:
        return
    modules = modules_of(parallel.model)
    gradients = [entry.name for unit in parallel.flat.units for entry in unit.unit.entries if entry.trainable]
    for pattern in wanted:
        if not any(fnmatch(name, pattern) for name in (*modules, *gradients)):
            here = ", ".join([*modules][:8])
            raise ValueError(f"no module or parameter of this rank has such a name (flip:layer={pattern}); e.g. {here}")
    for name, module in modules.items():
        if any(fnmatch(name, pattern) for pattern in wanted):
            module.register_forward_hook(_after(name))
    for unit in parallel.flat.units:
        _watch(unit)


def _after(name: str) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.numel()]
        if floats and injector.on_output(name):
            flip(floats[0])

    return hook


def _watch(unit: FlatUnit) -> None:
    reduce = unit.start_reduce

    def start_reduce() -> None:
        for entry in unit.unit.entries:
            if entry.trainable and injector.on_output(entry.name):
                flip(unit.gradient_of(entry))
        reduce()

    unit.start_reduce = start_reduce  # type: ignore[method-assign]


@torch.no_grad()
def flip(tensor: Tensor) -> None:
    """One bit of the largest element, whatever the tensor's layout."""
    values = tensor.data  # behind autograd's back, as memory does it
    at = values.abs().flatten().argmax()
    word = values.flatten()[at : at + 1].clone().view(WORDS[values.element_size()])
    values[torch.unravel_index(at, values.shape)] = (word ^ (1 << HIGHEST[values.dtype])).view(values.dtype)[0]
