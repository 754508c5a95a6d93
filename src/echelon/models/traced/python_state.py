"""Numbers and switches that a forward keeps in attributes of its modules: a trace has their values of one call.

A counter that scales a result would stand still in the graph, so its forward is refused. A forward may remember what
only spares it work, such as the longest sequence of a table: with the remembered values it traces to an equal graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.models.traced.traced_graph import TracedGraph

VALUES = (bool, int, float, str, type(None))
Attributes = dict[tuple[nn.Module, str], Any]


@contextmanager
def record_changes(model: nn.Module) -> Iterator[Attributes]:
    """Record which attributes a forward of the block changes, and to what; afterwards they are as before.

    torch.export resets those that were there; new ones, and new buffers, are removed here.
    """
    before, changed = _attributes(model), Attributes()
    names = [(held, set(held)) for module in model.modules() for held in (vars(module), module._buffers)]

    def compare(*_call: Any) -> None:
        after = _attributes(model)
        changed.update({key: value for key, value in after.items() if key not in before or before[key] != value})

    hook = model.register_forward_hook(compare)
    try:
        yield changed
    finally:
        hook.remove()
        for held, known in names:
            for name in set(held) - known:
                del held[name]


def _attributes(model: nn.Module) -> Attributes:
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, VALUES)
    }


def changes_result(graph: TracedGraph, changed: Attributes, trace_again: Callable[[], TracedGraph]) -> bool:
    """Whether a forward that finds the attributes as the last one left them computes something else."""
    missing = object()
    before = {(module, name): vars(module).get(name, missing) for module, name in changed}
    try:
        for (module, name), value in changed.items():
            setattr(module, name, value)
        return not _is_equal(graph, trace_again())
    except ValueError:  # it remembers tensors, too, which are gone: that forward would not run
        return False
    finally:
        for (module, name), value in before.items():
            delattr(module, name) if value is missing else setattr(module, name, value)


def _is_equal(graph: TracedGraph, other: TracedGraph) -> bool:
    """Whether two graphs have the same operators, settings and constants."""
    first, second = ([(op.kind, op.op, op.args, op.kwargs, op.shape) for op in each.ops] for each in (graph, other))
    return first == second and all(
        key in other.constants and torch.equal(value, other.constants[key]) for key, value in graph.constants.items()
    )
