"""`--inject flip:rank=1,step=5,layer=...`: flip one bit of a module's output or of a gradient, once."""

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
"""the highest mantissa bit: the value changes by at most a half, so no other check notices"""


def arm_bit_flips(parallel: ParallelModel) -> None:
    """Install the bit flips that were requested for this rank."""
    patterns = injector.pending_flip_patterns()
    if not patterns:
        return
    modules = hookable_modules(parallel.model)
    groups = parallel.sharded_model.param_groups
    gradients = [param.name for group in groups for param in group.spec.params if param.trainable]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in (*modules, *gradients)):
            examples = ", ".join([*modules][:8])
            raise ValueError(f"no module or parameter of this rank matches flip:layer={pattern}; e.g. {examples}")
    for name, module in modules.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            module.register_forward_hook(_output_hook(name))
    for group in groups:
        _hook_gradient_reduction(group)


def _output_hook(name: str) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        floats = [tensor for tensor in iter_tensors(output) if tensor.is_floating_point() and tensor.numel()]
        if floats and injector.should_flip_output(name):
            flip_bit(floats[0])

    return hook


def _hook_gradient_reduction(group: ParamGroup) -> None:
    start_reduction = group.reduction.start

    def start(group: ParamGroup) -> None:
        for param in group.spec.params:
            if param.trainable and injector.should_flip_output(param.name):
                flip_bit(group.grads.view(param))
        start_reduction(group)

    group.reduction.start = start  # type: ignore[method-assign]


@torch.no_grad()
def flip_bit(tensor: Tensor) -> None:
    """Flip one bit of the largest element, for any strides."""
    values = tensor.data  # invisible to autograd, as in a hardware fault
    at = values.abs().flatten().argmax()
    word = values.flatten()[at : at + 1].clone().view(INT_DTYPES[values.element_size()])
    values[torch.unravel_index(at, values.shape)] = (word ^ (1 << TOP_MANTISSA_BIT[values.dtype])).view(values.dtype)[0]
