"""`--inject flip:rank=1,step=5,layer=...`: one bit of what a module gives, or of a gradient, is wrong once."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from echelon.faults import injector
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.sharded_model import iter_tensors
from echelon.parallel.parallel_model import ParallelModel
from echelon.training.guard.module_outputs import hookable_modules
from echelon.training.guard.step_checksums import INT_DTYPES

TOP_MANTISSA_BIT = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}
"""the highest bit behind the point: the number changes by at most a half, so nothing else notices"""


def arm_bit_flips(parallel: ParallelModel) -> None:
    """Where such a fault was asked for on this rank."""
    wanted = injector.pending_flip_patterns()
    if not wanted:
        return
    modules = hookable_modules(parallel.model)
    gradients = [
        entry.name for unit in parallel.sharded_model.param_groups for entry in unit.spec.params if entry.trainable
    ]
    for pattern in wanted:
        if not any(fnmatch(name, pattern) for name in (*modules, *gradients)):
            here = ", ".join([*modules][:8])
            raise ValueError(f"no module or parameter of this rank has such a name (flip:layer={pattern}); e.g. {here}")
    for name, module in modules.items():
        if any(fnmatch(name, pattern) for pattern in wanted):
            module.register_forward_hook(_output_hook(name))
    for unit in parallel.sharded_model.param_groups:
        _hook_gradient_reduction(unit)


def _output_hook(name: str) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        floats = [tensor for tensor in iter_tensors(output) if tensor.is_floating_point() and tensor.numel()]
        if floats and injector.should_flip_output(name):
            flip_bit(floats[0])

    return hook


def _hook_gradient_reduction(unit: ParamGroup) -> None:
    reduction, start_reduction = unit.reduction, unit.reduction.start

    def start(group: ParamGroup) -> None:
        for entry in unit.spec.params:
            if entry.trainable and injector.should_flip_output(entry.name):
                flip_bit(unit.grads.view(entry))
        start_reduction(group)

    reduction.start = start  # type: ignore[method-assign]


@torch.no_grad()
def flip_bit(tensor: Tensor) -> None:
    """One bit of the largest element, whatever the tensor's layout."""
    values = tensor.data  # behind autograd's back, as memory does it
    at = values.abs().flatten().argmax()
    word = values.flatten()[at : at + 1].clone().view(INT_DTYPES[values.element_size()])
    values[torch.unravel_index(at, values.shape)] = (word ^ (1 << TOP_MANTISSA_BIT[values.dtype])).view(values.dtype)[0]
