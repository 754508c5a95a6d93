"""Modules that stay modules in a traced graph: their forward does more than its operators show.

A dropout draws by counters and has a window of its tensor; a BatchNorm reduces its statistics over ranks of dp. Each
call of one is a single operator of the graph, and runs the module that stands at its place when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.traced.traced_graph import ValueRef, replace_refs
from echelon.rng import RandomSite


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, with a `ValueRef` to the n-th tensor among its arguments."""

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returns_tuple: bool = False


class _Recorder:
    """The calls of one trace."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self.run: list[Callable[..., Any]] = []


_recorder: ContextVar[_Recorder] = ContextVar("module calls of the current trace")


@torch.library.custom_op("echelon::call_module", mutates_args=())
def call_module(tensors: list[Tensor], call: int) -> list[Tensor]:
    """Stand for a call of a module in a graph; graphs run the module itself."""
    raise NotImplementedError("a traced call of a module runs from its graph alone")


@call_module.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    recorder = _recorder.get()
    recorded = recorder.calls[call]
    args, kwargs = replace_refs((recorded.args, recorded.kwargs), lambda index: tensors[index])
    output = recorder.run[call](*args, **kwargs)
    # A result that is its input (dropout of p = 0) is a tensor of its own to the graph.
    return [torch.empty_like(value) for value in (output if isinstance(output, tuple) else (output,))]


def stays_module(module: nn.Module) -> bool:
    """Whether a module's calls stay calls."""
    return isinstance(module, nn.Dropout | RandomSite | nn.modules.batchnorm._BatchNorm)


@contextmanager
def modules_as_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Trace calls of modules that stay modules as single operators; yields the calls in the order of the trace."""
    recorder = _Recorder()
    replaced: list[nn.Module] = []
    for name, module in model.named_modules():
        if stays_module(module):
            module.forward = _recorded(recorder, name, module.forward)
            replaced.append(module)
    token = _recorder.set(recorder)
    try:
        yield recorder.calls
    finally:
        _recorder.reset(token)
        for module in replaced:
            del module.forward


def _recorded(recorder: _Recorder, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []

        def refer(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                return ValueRef(len(tensors) - 1)
            return value

        recorded = ModuleCall(name, tuple(map(refer, args)), {key: refer(value) for key, value in kwargs.items()})
        recorder.calls.append(recorded)
        recorder.run.append(forward)
        results = call_module(tensors, len(recorder.calls) - 1)
        return results[0] if len(results) == 1 else tuple(results)

    return call
