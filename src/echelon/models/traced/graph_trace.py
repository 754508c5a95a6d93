"""Traces the forward of a module to a `TracedGraph`, with torch.export: no values, no device, no memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree

from echelon.models.layer_lists import listed_layers
from echelon.models.traced.module_call import ModuleCall, modules_as_calls
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

RANDOM_OPS = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "uniform", "multinomial", "dropout")
"""words of operators that draw from torch's own generator"""
KIND_OF_INPUT = {
    InputKind.PARAMETER: PARAM,
    InputKind.BUFFER: BUFFER,
    InputKind.CONSTANT_TENSOR: CONSTANT,
    InputKind.USER_INPUT: INPUT,
}


def copy_of(target: Tensor, source: Tensor, *_non_blocking: Any) -> Tensor:
    """Functional `copy_`, which torch has without a derivative."""
    return source.to(target.dtype).expand(target.shape).clone()


DIFFERENTIABLE = {torch.ops.aten.copy.default: copy_of}
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
    on_cpu = {
        key: torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value
        for key, value in inputs.items()
    }
    with modules_as_calls(template) as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export announces changes of its own
        try:
            program = torch.export.export(template, (), on_cpu, strict=False)
            # Without a table this decomposes nothing: it replaces in-place operators by those that return a new tensor.
            program = program.run_decompositions({})
        except Exception as error:  # whatever a user's code raises without values
            first = str(error).strip().splitlines() or [""]
            raise UntraceableError(
                f"the forward of {type(template).__name__} cannot be traced without values "
                f"({type(error).__name__}: {first[0][:200]}); let shapes and branches depend on sizes alone"
            ) from error
    return _read_program(template, program, tuple(calls))


def _read_program(
    template: nn.Module, program: torch.export.ExportedProgram, calls: tuple[ModuleCall, ...]
) -> TracedGraph:
    layers = listed_layers(template)
    entries = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    index_of: dict[torch.fx.Node, int] = {}
    ops: list[TracedOp] = []
    user_inputs = iter(_input_names(program))
    trainable = {name for name, p in template.named_parameters(remove_duplicate=False) if p.requires_grad}
    outputs: Sequence[Any] = ()
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = node.args[0]
            continue
        shape, dtype = _shape_and_dtype(node.meta.get("val"))
        if node.op == "placeholder":
            spec = entries[node.name]
            if spec.kind != InputKind.USER_INPUT and not node.users:
                continue  # another name of a tied parameter, for example
            index_of[node] = len(ops)
            kind = KIND_OF_INPUT[spec.kind]
            target = next(user_inputs) if kind == INPUT else str(spec.target)
            ops.append(
                TracedOp(
                    name=target,
                    kind=kind,
                    target=target,
                    shape=shape,
                    dtype=dtype,
                    is_differentiable=kind == PARAM and target in trainable,
                )
            )
            continue
        if node.op != "call_function":
            raise UntraceableError(f"the trace of {type(template).__name__} has an operator of kind {node.op!r}")
        index_of[node] = len(ops)
        args, kwargs = _with_refs((node.args, dict(node.kwargs)), index_of)
        path = _module_path(node)
        is_module = node.target == torch.ops.echelon.call_module.default
        target: Any = DIFFERENTIABLE.get(node.target, node.target)
        if is_module:
            call = calls[args[1]]
            target, kwargs, args = call.module, {"call": args[1]}, (args[0],)
        _refuse_random(template, node)
        layer = next((layer for layer in layers if path == layer or path.startswith(f"{layer}.")), "")
        made = TracedOp(
            name=node.name,
            kind=MODULE if is_module else CALL,
            target=target,
            args=tuple(args),
            kwargs=kwargs,
            layer=layer,
            module=target if is_module else path,
            shape=shape,
            dtype=dtype,
        )
        flows = dtype.is_floating_point and node.target is not torch.ops.aten.detach.default
        depends = flows and (is_module or any(ops[index].is_differentiable for index in made.inputs))
        ops.append(replace(made, is_differentiable=depends))
    return _finish(program, ops, index_of, outputs, calls)


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
            raise UntraceableError(f"the forward changes one of its inputs ({spec.target}); let it return a new tensor")
    tree = _pytree.tree_unflatten(given, program.call_spec.out_spec)
    constants = {key: value for key, value in program.constants.items() if isinstance(value, Tensor)}
    return TracedGraph(ops=tuple(ops), outputs=tree, mutated_buffers=mutated, constants=constants, calls=calls)


def _input_names(program: torch.export.ExportedProgram) -> list[str]:
    """The keyword of each tensor that enters, in order."""
    _, kwargs = program.example_inputs or ((), {})
    return [key for key, value in kwargs.items() if isinstance(value, Tensor)]


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(value, tuple | list):
        value = next((item for item in value if isinstance(item, Tensor)), None)
    if not isinstance(value, Tensor):
        return (), torch.float32
    return tuple(int(size) for size in value.shape), value.dtype


def _with_refs(value: Any, index_of: Mapping[torch.fx.Node, int]) -> Any:
    if isinstance(value, torch.fx.Node):
        return ValueRef(index_of[value])
    if isinstance(value, tuple | list):
        items = [_with_refs(item, index_of) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {key: _with_refs(item, index_of) for key, item in value.items()}
    return value


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _refuse_random(template: nn.Module, node: torch.fx.Node) -> None:
    name: str = getattr(node.target, "__name__", "").partition(".")[0]
    draws = any(name == word or name in (f"native_{word}", f"{word}_like") for word in RANDOM_OPS)
    if draws and not (name == "native_dropout" and node.args[1] == 0):
        raise UntraceableError(
            f"the forward of {type(template).__name__} draws random numbers from torch's own generator ({name} in "
            f"{_module_path(node) or 'its forward'}); use nn.Dropout or echelon.RandomDraws, which every layout repeats"
        )
