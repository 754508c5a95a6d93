"""What the modules of a model give, as it is made: for whoever looks for a number that is not what it should be.

Our linear layers are left out. Those that read the same input are computed together where nobody watches them, and a
step that is looked at must be computed as every other is. What comes out of them is in the output of what they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.layers import Linear
from echelon.parallel.dp.sharded_model import iter_tensors

OutputCallback = Callable[[str, Tensor], None]
"""takes a module's name, and a floating-point tensor that it gave"""


def hookable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those that can be watched, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and not isinstance(module, Linear) and not hasattr(module, "together")
    }


@contextmanager
def watch_outputs(
    model: nn.Module, on_output: OutputCallback, on_enter: Callable[[str], None] = lambda name: None
) -> Iterator[None]:
    """Every output is shown, when it is made; `enter` is told of modules that begin."""

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
