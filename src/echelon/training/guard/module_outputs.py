"""Hooks on the outputs of a model's modules, for NaN debugging and the replay check.

Our linear layers are excluded: those that share an input are fused into one GEMM unless they have hooks, and an
observed step must compute what every other step does. Their values reach the output of the containing module. For the
same reason modules inside compiled layers have none, unless layers run as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.layers import Linear
from echelon.parallel.dp.sharded_model import iter_tensors
from echelon.parallel.regional_compile import inside_compiled_layers

OutputCallback = Callable[[str, Tensor], None]
"""takes a module's name and a floating-point tensor of its output"""


def hookable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may have hooks, by name."""
    inside = inside_compiled_layers(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name and name not in inside and not isinstance(module, Linear) and not hasattr(module, "together")
    }


@contextmanager
def watch_outputs(
    model: nn.Module, on_output: OutputCallback, on_enter: Callable[[str], None] = lambda name: None
) -> Iterator[None]:
    """Call `on_output` with every output, and `on_enter` before every module's forward."""

    def before(name: str) -> Callable[..., None]:
        return lambda _module, _args: on_enter(name)

    def after(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in iter_tensors(output):
                if tensor.is_floating_point():
                    with torch.no_grad():
                        on_output(name, tensor.detach())

        return hook

    handles = []
    try:
        for name, module in hookable_modules(model).items():
            handles.append(module.register_forward_pre_hook(before(name)))
            handles.append(module.register_forward_hook(after(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
