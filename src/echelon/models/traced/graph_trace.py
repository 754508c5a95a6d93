"""Traces the forward of a module to a `TracedGraph`, with torch.export: no values, no device, no memory."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind

from echelon.compat import unflatten_outputs
from echelon.models.layer_lists import listed_layers
from echelon.models.traced.module_call import ModuleCall, modules_as_calls
from echelon.models.traced.python_state import Attributes, changes_result, record_changes
from echelon.models.traced.quiet_export import quiet_export
from echelon.models.traced.traced_graph import (
    BUFFER,
    CALL,
    CONSTANT,
    INPUT,
    MODULE,
    PARAM,
    TracedGraph,
    TracedOp,
    ValueRef,
)

NAMED_BY_MODULE = frozenset(
    ("linear", "embedding", "layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "conv3d")
)
"""operators that a module of torch consists of"""
DROPOUT_RATES, DROPOUT_SWITCHES = ("p", "dropout", "dropout_p"), ("train", "training")
"""arguments with which an operator draws nothing: a rate of zero, a switch that is off"""
KIND_OF_INPUT = {
    InputKind.PARAMETER: PARAM,
    InputKind.BUFFER: BUFFER,
    InputKind.CONSTANT_TENSOR: CONSTANT,
    InputKind.USER_INPUT: INPUT,
}


def copy_of(target: Tensor, source: Tensor, *_non_blocking: Any) -> Tensor:
    """Functional `copy_`, which torch has without a derivative."""
    return source.to(target.dtype).expand(target.shape).clone()


DIFFERENTIABLE: dict[Any, Any] = {torch.ops.aten.copy.default: copy_of}
"""what stands for an operator without a derivative"""


class UntraceableError(ValueError):
    """The forward of a module cannot be traced."""


def tracing_template(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module whose parameters have shapes, strides and a dtype, but no memory; on the CPU.

    Buffers and other tensors keep their values: a forward may compute with them while it is traced.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, device="cpu", dtype=wanted, requires_grad=False)
        empty.untyped_storage().resize_(0)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    template = copy.deepcopy(model, memo)
    for module in template.modules():
        for name, buffer in module.named_buffers(recurse=False):
            wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            moved = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()
            module._buffers[name] = moved.to(wanted)
    return template


def trace(template: nn.Module, inputs: Mapping[str, Any]) -> TracedGraph:
    """Trace a forward with keyword arguments of these shapes and dtypes; their values are not read."""

    def traced() -> tuple[TracedGraph, Attributes]:
        with record_changes(template) as changed:
            return _trace_once(template, inputs), changed

    graph, changed = traced()
    if changed and changes_result(graph, changed, lambda: traced()[0]):
        names = {id(module): name for name, module in template.named_modules()}
        listed = [f"{names[id(module)]}.{attribute}".lstrip(".") for module, attribute in changed]
        raise UntraceableError(
            f"the forward of {type(template).__name__} computes with attributes that it changes itself "
            f"({', '.join(listed[:3])}), which a trace cannot; register them as buffers"
        )
    return graph


def _trace_once(template: nn.Module, inputs: Mapping[str, Any]) -> TracedGraph:
    on_cpu = {
        key: torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value
        for key, value in inputs.items()
    }
    quiet, recorded = quiet_export(), modules_as_calls(template)
    with recorded as calls, _refuse_own_backward(template), quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export announces changes of its own
        try:
            program = torch.export.export(template, (), on_cpu, strict=False)
            _detach_without_grad(program)
            # Without a table this decomposes nothing: it replaces in-place operators by those that return a new tensor.
            program = program.run_decompositions({})
        except UntraceableError:
            raise
        except Exception as error:  # whatever a user's code raises without values
            first = str(error).strip().splitlines() or [""]
            raise UntraceableError(
                f"the forward of {type(template).__name__} cannot be traced without values "
                f"({type(error).__name__}: {first[0][:200]}); let shapes and branches depend on sizes alone"
            ) from error
    device = next((value.device for value in inputs.values() if isinstance(value, Tensor)), torch.device("cpu"))
    return _read_program(template, program, tuple(calls), device)


@contextmanager
def _refuse_own_backward(template: nn.Module) -> Iterator[None]:
    """Refuse functions with a backward of their own: a trace has their forward alone."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if (
            cls.__module__ == torch.utils.checkpoint.__name__
        ):  # keeps inputs of torch 2.11's checkpoint, computes nothing
            return apply.__func__(cls, *args, **kwargs)
        raise UntraceableError(
            f"the forward of {type(template).__name__} calls {cls.__qualname__}, an autograd.Function, whose backward "
            "is no part of a trace; use torch's operators, or torch.library.custom_op with register_autograd"
        )

    apply = torch.autograd.Function.__dict__["apply"]
    function: Any = torch.autograd.Function
    function.apply = classmethod(refuse)
    try:
        yield
    finally:
        function.apply = apply


def _detach_without_grad(program: torch.export.ExportedProgram) -> None:
    """Detach what a block of `torch.no_grad()` gives to the rest: the blocks themselves are lost in the next pass."""
    graph = program.graph_module.graph
    for block in graph.nodes:
        if block.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or block.args[0]:
            continue
        for result in block.users:
            readers = [user for user in result.users if user.op != "output"]
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta.update(result.meta)
            for reader in readers:
                reader.replace_input_with(result, detached)
    program.graph_module.recompile()


def _read_program(
    template: nn.Module, program: torch.export.ExportedProgram, calls: tuple[ModuleCall, ...], device: torch.device
) -> TracedGraph:
    reader = _ProgramReader(template, program, calls, device)
    live = _live_nodes(program)
    outputs: Sequence[Any] = ()
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = node.args[0]
        elif node in live:
            reader.read(node)
    return _finish(program, reader.ops, reader.index_of, outputs, calls)


def _live_nodes(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Nodes that the results depend on: without checks of metadata, and other names of a tied parameter."""
    live: set[torch.fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op == "output" or node in live:
            live.update((node, *node.all_input_nodes))
    return live


class _ProgramReader:
    """Reads the nodes of an exported program, in order."""

    def __init__(
        self,
        template: nn.Module,
        program: torch.export.ExportedProgram,
        calls: tuple[ModuleCall, ...],
        device: torch.device,
    ):
        self.template, self.calls, self.device = template, calls, device
        self.layers = listed_layers(template)
        self.entries = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
        if len(names) != len(keys := _input_names(program)):
            raise UntraceableError(
                f"the forward of {type(template).__name__} takes containers of tensors ({', '.join(keys)}); "
                "give each tensor a keyword of its own"
            )
        self.input_names = dict(zip(names, keys, strict=True))
        self.trainable = {name for name, p in template.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.ops: list[TracedOp] = []
        self.index_of: dict[torch.fx.Node, int] = {}
        self._names: Counter[str] = Counter()

    def read(self, node: torch.fx.Node) -> None:
        if node.op not in ("placeholder", "call_function"):
            raise UntraceableError(f"the trace of {type(self.template).__name__} has an operator of kind {node.op!r}")
        self.index_of[node] = len(self.ops)
        self.ops.append(self._entry(node) if node.op == "placeholder" else self._call(node))

    def _entry(self, node: torch.fx.Node) -> TracedOp:
        spec = self.entries[node.name]
        kind = KIND_OF_INPUT[spec.kind]
        name = self.input_names[node.name] if kind == INPUT else str(spec.target)
        trains = kind == PARAM and name in self.trainable
        return TracedOp(name=name, kind=kind, target=name, is_differentiable=trains, **_result(self.template, node))

    def _call(self, node: torch.fx.Node) -> TracedOp:
        args, kwargs = _with_refs((node.args, dict(node.kwargs)), self.index_of, self.device)
        path = _module_path(node)
        target: Any = DIFFERENTIABLE.get(node.target, node.target)
        is_module = target == torch.ops.echelon.call_module.default
        if is_module:
            target, kwargs, args = self.calls[args[1]].module, {"call": args[1]}, (args[0],)
            path = target
        _refuse_random(self.template, node)
        result = _result(self.template, node)
        op = TracedOp(
            name=node.name,
            kind=MODULE if is_module else CALL,
            target=target,
            args=tuple(args),
            kwargs=kwargs,
            layer=next((layer for layer in self.layers if path == layer or path.startswith(f"{layer}.")), ""),
            module=path,
            **result,
        )
        # A result that is no tensor, as of item(), has no gradient.
        flows = (
            bool(result)
            and (op.dtype.is_floating_point or op.dtype.is_complex)
            and node.target is not torch.ops.aten.detach.default
        )
        depends = flows and (is_module or any(self.ops[index].is_differentiable for index in op.inputs))
        return replace(op, name=self._readable_name(op), is_differentiable=depends)

    def _readable_name(self, op: TracedOp) -> str:
        """`blocks.0.up` for the operator that a module is, `blocks.0.gelu` for others, numbered where several are."""
        is_the_module = op.kind == MODULE or op.op in NAMED_BY_MODULE
        base = op.module if is_the_module and op.module else f"{op.module}.{op.op}".lstrip(".")
        self._names[base] += 1
        return base if self._names[base] == 1 else f"{base}#{self._names[base]}"


def _finish(
    program: torch.export.ExportedProgram,
    ops: list[TracedOp],
    index_of: Mapping[torch.fx.Node, int],
    outputs: Sequence[Any],
    calls: tuple[ModuleCall, ...],
) -> TracedGraph:
    mutated: dict[str, int] = {}
    given: list[Any] = []
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        ref = _with_refs(value, index_of)
        if spec.kind == OutputKind.BUFFER_MUTATION:
            mutated[str(spec.target)] = ref.index
        elif spec.kind == OutputKind.USER_OUTPUT:
            given.append(ref)
        else:
            changed, remedy = "one of its inputs", "let it return a new tensor"
            if spec.target in program.graph_signature.parameters:
                changed, remedy = "a parameter", "only the optimizer may (an embedding's max_norm does, too)"
            raise UntraceableError(f"the forward changes {changed} ({spec.target}); {remedy}")
    tree = unflatten_outputs(program, given)
    constants = {key: value for key, value in program.constants.items() if isinstance(value, Tensor)}
    return TracedGraph(ops=tuple(ops), outputs=tree, mutated_buffers=mutated, constants=constants, calls=calls)


def _input_names(program: torch.export.ExportedProgram) -> list[str]:
    """The keywords of what enters, in order."""
    _, kwargs = program.example_inputs or ((), {})
    return list(kwargs)


def _result(template: nn.Module, node: torch.fx.Node) -> dict[str, Any]:
    """Shape and dtype of a node's result, or of the first of several."""
    value = node.meta.get("val")
    tensors = [item for item in (value if isinstance(value, tuple | list) else (value,)) if isinstance(item, Tensor)]
    if not tensors:
        return {}
    if any(not isinstance(size, int) for tensor in tensors for size in tensor.shape):
        raise UntraceableError(
            f"the forward of {type(template).__name__} makes a tensor whose size depends on values ({node.name} in "
            f"{_module_path(node) or 'its forward'}); let shapes depend on sizes alone, as torch.where does"
        )
    return {
        "shape": tuple(tensors[0].shape),
        "dtype": tensors[0].dtype,
        "num_elements": sum(tensor.numel() for tensor in tensors),
    }


def _with_refs(value: Any, index_of: Mapping[torch.fx.Node, int], device: torch.device | None = None) -> Any:
    """Arguments of a node, with references to others; what it makes lies on the device of the inputs."""
    if isinstance(value, torch.fx.Node):
        return ValueRef(index_of[value])
    if isinstance(value, torch.device):
        return device or value
    if isinstance(value, tuple | list):
        items = [_with_refs(item, index_of, device) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {key: _with_refs(item, index_of, device) for key, item in value.items()}
    return value


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _refuse_random(template: nn.Module, node: torch.fx.Node) -> None:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    normalized = node.normalized_arguments(template, normalize_to_only_use_kwargs=True)
    settings = normalized.kwargs if normalized else {}
    is_off = any(settings.get(key, True) is False for key in DROPOUT_SWITCHES)
    if not is_off and all(settings.get(key) != 0 for key in DROPOUT_RATES):
        name = getattr(node.target, "__name__", "").partition(".")[0]
        raise UntraceableError(
            f"the forward of {type(template).__name__} draws random numbers from torch's own generator ({name} in "
            f"{_module_path(node) or 'its forward'}); use nn.Dropout or echelon.rng.RandomDraws, which every layout "
            "repeats"
        )
