"""Regional `torch.compile`: the layers of a user's model are compiled, once for all layers of a class.

The repeated layers hold nearly all the time of a step, and are alike: one compilation serves all of them, in seconds,
where that of a whole model takes minutes. Hooks on a layer stay outside of what is compiled, so that parameters are
unsharded, gradients reduced and layers recomputed as without it. Layers of classes of this project are left alone: they
call kernels of their own.

[Note: how much of a layer is compiled]

    whole      one graph, for the shapes at hand; after STATIC_COMPILATIONS of a class, for any shapes
    in parts   the code calls what is not compiled (a collective of tensor parallelism, say), or depends on values of
               tensors: what is between is compiled
    not        the compiler raised an error, or a layer that is recomputed would be compiled in parts: as written

Each step down is reported once for a class, with the cause. Guards of a compilation must not tell layers apart: what is
particular to a layer (the key of a dropout, say) reaches compiled code as a tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from echelon import compat
from echelon.layout.layout import SPLIT_BACKWARD_SCHEDULES
from echelon.memory.compression import cost as compression_cost
from echelon.models.layer_lists import listed_layers
from echelon.models.traced.graph_model import GraphModel
from echelon.parallel.comm.autograd_collective import keep_out_of_compiled_code
from echelon.parallel.comm.mesh_axis import world_rank

if TYPE_CHECKING:
    from echelon.parallel.parallel_options import ParallelOptions
    from echelon.parallel.transform_context import TransformContext

STATIC_COMPILATIONS = 16
"""compilations of a class for shapes at hand; the next is for any shapes: a length may change with each batch"""
MAX_COMPILATIONS = 64
"""entries of torch's cache for one function, which classes share: torch allows 8"""
WHOLE_LAYER_POLICIES = ("none", "full", "every", "sqrt")
"""values of `recompute` that recompute layers from their inputs"""
OFF = "compile=off turns this off"


def compile_layers(context: TransformContext) -> None:
    """Compile the layers of a user's model, under `compile`."""
    options = context.options
    if not is_asked_for(options):
        return
    layers = compilable_layers(context.model)
    if layers and (reason := _obstacle(context)):
        _report(f"layers are not compiled: {reason}; {OFF}")
        return
    keep_out_of_compiled_code()
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for name in layers:
        layer = context.model.get_submodule(name)
        by_class.setdefault(type(layer), []).append(layer)
    for layer_class, modules in by_class.items():
        allows_parts = context.layout.recompute == "none"
        compiled = CompiledClass(layer_class, options.compile_backend, allows_parts=allows_parts)
        for layer in modules:
            layer.forward, layer.compiled_class = partial(compiled, layer), compiled  # type: ignore[assignment]


def compiled_layers(model: nn.Module) -> Counter[str]:
    """Count the compiled layers of each class."""
    classes = (getattr(module, "compiled_class", None) for module in model.modules())
    return Counter(found.name for found in classes if isinstance(found, CompiledClass))


def inside_compiled_layers(model: nn.Module) -> set[str]:
    """Return the modules inside compiled layers, which their code does not call one by one."""
    if _as_written:
        return set()
    layers = ((name, module) for name, module in model.named_modules() if hasattr(module, "compiled_class"))
    return {f"{name}.{inner}" for name, layer in layers for inner, _ in layer.named_modules() if inner}


_as_written = False


@contextmanager
def layers_as_written() -> Iterator[None]:
    """Run layers as written inside this context, where something must see the modules inside of them."""
    global _as_written
    before, _as_written = _as_written, True
    try:
        yield
    finally:
        _as_written = before


def is_asked_for(options: ParallelOptions) -> bool:
    """Return whether layers are to be compiled: `auto` does on a GPU, but not in float64, which is for comparison."""
    if options.compile != "auto":
        return options.compile == "on"
    return options.device.type == "cuda" and options.compute_dtype != torch.float64 and options.kernels == "auto"


def compilable_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the layers of the model's lists that are made of modules and are not of this project."""
    return tuple(name for name in listed_layers(model) if _is_compilable(model.get_submodule(name)))


def is_user_class(module_class: type[nn.Module]) -> bool:
    """Return whether a class is not of this project."""
    return module_class.__module__.partition(".")[0] != __name__.partition(".")[0]


def _is_compilable(layer: nn.Module) -> bool:
    layer_class = type(layer)
    has_forward = layer_class.forward is not nn.Module.forward and "forward" not in vars(layer)
    return (
        has_forward
        and is_user_class(layer_class)
        and any(True for _ in layer.children())
        and not compat.is_compiled(layer)
    )


def _obstacle(context: TransformContext) -> str:
    """Return what in a layout must see the operators of a layer one by one; empty if nothing."""
    layout, options, model = context.layout, context.options, context.model
    if layout.tp > 1 and layout.tp_kind != "1d":
        return f"ranks communicate inside of their linears (tp_kind={layout.tp_kind})"
    for axis in ("cp", "ep"):
        if getattr(layout, axis) > 1:
            return f"ranks communicate inside of them ({axis}={getattr(layout, axis)})"
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        return f"schedule={layout.schedule} computes weight gradients in another half of backward"
    if layout.recompute.partition(":")[0] not in WHOLE_LAYER_POLICIES:
        return f"recompute={layout.recompute} chooses among the operators of a layer"
    if options.compress != compression_cost.NONE:
        return f"compress={options.compress} reads the tensors that each operator saves"
    if isinstance(model, GraphModel) and model.runs_graph:
        return f"{type(model).__name__} runs from its traced graph ({layout})"
    return ""


class CompiledClass:
    """The forward of all layers of one class, compiled: called with the layer, then its arguments."""

    def __init__(
        self,
        layer_class: type[nn.Module],
        backend: str | Callable[..., Any] = "inductor",
        *,
        allows_parts: bool = True,
    ):
        self.name, self.as_written = layer_class.__name__, layer_class.forward
        self.backend = compat.compiler_backend(backend) if isinstance(backend, str) else backend
        self.allows_parts = allows_parts
        """a layer that is recomputed must save the same tensors again, which only one graph is sure to do"""
        self.num_compilations = 0
        """graphs that were compiled"""
        self.is_whole, self.is_dynamic = True, False
        """see [Note: how much of a layer is compiled]"""
        self._has_run, self._is_reported = False, False
        self._written: WeakSet[nn.Module] = WeakSet()
        """layers that run as written: others may wait for a backward that recomputes what they ran"""
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, MAX_COMPILATIONS)
        self._compile()

    @property
    def is_compiled(self) -> bool:
        """Some layer runs compiled, or has not run yet."""
        return self._has_run or not self._written

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _as_written or not self.is_compiled or layer in self._written:
            return self.as_written(layer, *args, **kwargs)
        try:
            output = self._run(layer, *args, **kwargs)
        except Exception as error:
            if self._has_run and not compat.is_compile_error(error):
                raise  # of the layer, or of what surrounds it
            failure = error
        else:
            self._has_run = True
            self._allow_any_shapes()
            return output
        if self.is_whole and self.allows_parts and compat.is_graph_break(failure):
            self.is_whole = False
            self._compile()
            _report(f"layers {self.name} are compiled in parts: {first_line(failure)}; {OFF}")
            return self(layer, *args, **kwargs)
        output = self.as_written(layer, *args, **kwargs)  # raises if the error was the layer's own
        self._written.add(layer)
        if not self._is_reported:
            self._is_reported = True
            _report(f"layers {self.name} are not compiled: {first_line(failure)}; {OFF}")
        return output

    def _compile(self) -> None:
        self._run = torch.compile(
            self.as_written, fullgraph=self.is_whole, dynamic=self.is_dynamic, backend=self._compile_graph
        )

    def _compile_graph(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.num_compilations += 1
        return self.backend(graph, inputs)

    def _allow_any_shapes(self) -> None:
        if not self.is_dynamic and self.num_compilations >= STATIC_COMPILATIONS:
            self.is_dynamic = True
            self._compile()


def first_line(error: Exception) -> str:
    """Return the first line of an error that says something."""
    lines = (line.strip() for line in str(compat.compile_error_cause(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _report(text: str) -> None:
    if world_rank() == 0:
        warnings.warn(text, stacklevel=2)
