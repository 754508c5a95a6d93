"""A module that runs from its graph: whole or by layers, on what a rank holds of each tensor.

`make_traceable` derives a class from the module's own, of the same name. Until something asks for the graph (tensor
parallelism without a table, a pipeline without `pipeline_model`), it runs as written. Then each forward runs the
operators that were traced for inputs of its shapes; other shapes are traced when they come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.layer_lists import listed_layers
from echelon.models.pipeline_model import PipelineLayer, PipelineModel, is_within
from echelon.models.traced.graph_trace import trace, tracing_template
from echelon.models.traced.traced_graph import BUFFER, CONSTANT, INPUT, MODULE, PARAM, TracedGraph, replace_refs

EXAMPLE_ROWS = 8
"""rows of the batch of an example trace, whatever rows were given: what is derived from it is the same in every run"""
Values = dict[int, Any]
"""results of operators"""


class OpRunner:
    """Runs operators of a graph as they were traced; parallelism replaces how."""

    def __init__(self, graph: TracedGraph):
        self.graph = graph

    def run(self, index: int, read: Callable[[int], Any], model: nn.Module, cache: dict[Any, Any]) -> Any:
        """Run one operator. `read` gives the results of others; `cache` lives as long as a segment runs."""
        op = self.graph.ops[index]
        args, kwargs = replace_refs((op.args, dict(op.kwargs)), read)
        if op.kind == MODULE:
            return self.call_module(index, args[0], model)
        assert callable(op.target)
        return op.target(*args, **kwargs)

    def call_module(self, index: int, tensors: list[Tensor], model: nn.Module) -> tuple[Any, ...]:
        """Call a module that stays one."""
        op = self.graph.ops[index]
        call = self.graph.calls[op.kwargs["call"]]
        args, kwargs = replace_refs((call.args, call.kwargs), lambda number: tensors[number])
        result = model.get_submodule(call.module)(*args, **kwargs)
        return result if isinstance(result, tuple) else (result,)

    def finish(self, index: int, value: Any) -> Any:
        """What the forward returns of a result."""
        return value


class SegmentCall:
    """What a layer is called with in place of its own arguments: run this segment."""

    def __init__(self, forward: GraphForward, number: int):
        self.forward, self.number = forward, number


class GraphForward:
    """One forward: a graph, its inputs, and what is shared by its segments."""

    def __init__(self, model: GraphModel, runner: OpRunner, inputs: Mapping[str, Any]):
        self.model, self.runner, self.graph = model, runner, runner.graph
        self.inputs = inputs
        self.device = next((value.device for value in inputs.values() if isinstance(value, Tensor)), None)
        self.shared: Values = {}
        self._buffers: dict[str, Tensor] = {}
        """as they were: a layer that is recomputed reads them again"""
        self._changed: set[str] = set()
        cache: dict[Any, Any] = {}
        for index in self.graph.shared:
            self.shared[index] = runner.run(index, lambda i: self._read(i, self.shared), model, cache)
        self._change_buffers(-1, self.shared)

    def run_segment(self, number: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run a segment on the results that it reads, and return those that it gives."""
        segment = self.graph.segments[number]
        known: Values = dict(zip(segment.reads, values, strict=True))
        new_values = {self.graph.mutated_buffers[name] for name in self.graph.buffer_changes.get(number, ())}
        last_read = {i: index for index in segment.ops for i in self.graph.ops[index].inputs}
        cache: dict[Any, Any] = {}
        for index in segment.ops:
            known[index] = self.runner.run(index, lambda i: self._read(i, known), self.model, cache)
            for source in self.graph.ops[index].inputs:
                if last_read[source] == index and source not in segment.gives and source not in new_values:
                    known.pop(source, None)
        self._change_buffers(number, known)
        return tuple(known[index] for index in segment.gives)

    def call_segment(self, number: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run a segment through its layer, whose hooks then run."""
        owner = self.graph.segments[number].owner
        if not owner:
            return self.run_segment(number, values)
        results = self.model.get_submodule(owner)(SegmentCall(self, number), *values)
        return results if isinstance(results, tuple) else (results,)

    def outputs(self, values: Values) -> Any:
        """What the forward returns."""
        return replace_refs(self.graph.outputs, lambda index: self.runner.finish(index, self._read(index, values)))

    def _change_buffers(self, number: int, known: Values) -> None:
        """Give the model the new values of buffers that change with a segment, once."""
        for name in self.graph.buffer_changes.get(number, ()):
            if name not in self._changed:
                self._changed.add(name)
                self._buffers.setdefault(name, self.model.live_buffer(name))
                index = self.graph.mutated_buffers[name]
                self.model.set_buffer(name, self.runner.finish(index, self._read(index, known)).detach())

    def _read(self, index: int, known: Values) -> Any:
        if index in known:
            return known[index]
        if index in self.shared:
            return self.shared[index]
        op = self.graph.ops[index]
        name = str(op.target)
        if op.kind == PARAM:
            return self.model.get_parameter(name)
        if op.kind == INPUT:
            return self.inputs[name]
        if op.kind == BUFFER:
            if name not in self._buffers:
                self._buffers[name] = self.model.live_buffer(name)
            return self._buffers[name]
        assert op.kind == CONSTANT, f"operator {op.name} was not run"
        return self.model.on_device(self.graph.constants[name], self.device)


class GraphLayer(nn.Module):
    """What `make_traceable` adds to the class of each layer: it runs segments of the whole model's graph."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (args and isinstance(args[0], SegmentCall)):
            return super().forward(*args, **kwargs)
        call, *values = args
        results = call.forward.run_segment(call.number, tuple(values))
        return results[0] if len(results) == 1 else results


class GraphModel(nn.Module):
    """What `make_traceable` adds to the class of a module."""

    example_inputs: Mapping[str, Any]
    """keyword arguments of the forward, for a first trace"""
    _template: tuple[nn.Module]
    """in a tuple, or its parameters would be the model's"""
    runs_graph = False
    """forward runs from the graph; else as written"""
    make_runner: Callable[[TracedGraph], OpRunner] = OpRunner
    _graphs: dict[Any, TracedGraph]
    _runners: dict[Any, OpRunner]
    _constants: dict[int, Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As written, or from the graph: keyword arguments alone."""
        if not self.runs_graph:
            return super().forward(*args, **kwargs)
        if args:
            raise ValueError(f"{type(self).__name__} runs from a traced graph; call it with keyword arguments")
        forward = self.start_forward(**kwargs)
        values: Values = {}
        for number, segment in enumerate(forward.graph.segments):
            results = forward.call_segment(number, tuple(values[index] for index in segment.reads))
            values.update(zip(segment.gives, results, strict=True))
        return forward.outputs(values)

    def start_forward(self, **inputs: Any) -> GraphForward:
        """What all segments of one forward share."""
        return GraphForward(self, self._runner(inputs), inputs)

    @property
    def template(self) -> nn.Module:
        """The module as it was given, without the memory of its parameters: what is traced."""
        return self._template[0]

    def example_graph(self) -> TracedGraph:
        """The graph of a forward of the example's inputs, in training."""
        return self.graph_of(self.example_inputs, training=True)

    def graph_of(self, inputs: Mapping[str, Any], *, training: bool) -> TracedGraph:
        """The graph of a forward of inputs like these, traced once."""
        key = _signature(inputs, training)
        if key not in self._graphs:
            self._graphs[key] = trace(self.template.train(training), inputs)
        return self._graphs[key]

    def retype(self, dtype: torch.dtype) -> None:
        """Trace with parameters of another dtype from now on."""
        self._template = (tracing_template(self.template, dtype),)
        self.example_inputs = {
            key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for key, value in self.example_inputs.items()
        }
        self._graphs, self._runners = {}, {}

    def _runner(self, inputs: Mapping[str, Any]) -> OpRunner:
        key = _signature(inputs, self.training)
        if key not in self._runners:
            self._runners[key] = self.make_runner(self.graph_of(inputs, training=self.training))
        return self._runners[key]

    def live_buffer(self, name: str) -> Tensor:
        """A buffer of this rank's model; one of another pipeline stage comes from the template."""
        owner, _, attribute = name.rpartition(".")
        try:
            found = self.get_submodule(owner)._buffers.get(attribute)
        except AttributeError:
            found = None
        return found if found is not None else self.template.get_buffer(name)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Change a buffer of this rank's model."""
        owner, _, attribute = name.rpartition(".")
        self.get_submodule(owner)._buffers[attribute] = value

    def on_device(self, constant: Tensor, device: torch.device | None) -> Tensor:
        """A constant of a graph, moved once."""
        if device is None or constant.device == device:
            return constant
        return self._constants.setdefault(id(constant), constant.to(device))

    # -- pipeline layers ----------------------------------------------------------------------------------------------

    def pipeline_model(self) -> PipelineModel:
        """The segments of the graph as pipeline layers; they hand on every result that a later one reads."""
        self.runs_graph = True
        graph = self.example_graph()
        _refuse_without_layers(self, graph)
        _refuse_shared_buffers(graph)
        everywhere = tuple(str(graph.ops[index].target) for index in graph.shared if graph.ops[index].kind == MODULE)
        used = [_modules_of(graph, number) for number in range(len(graph.segments))]
        tied = _tied_names(self.template)
        held = [{name for module in modules for name in tied.get(module, (module,))} for modules in used]
        held[-1] |= {
            name
            for name, _ in self.named_parameters(remove_duplicate=False)
            if not any(is_within(name, module) for modules in held for module in modules)
        }  # parameters that no operator reads
        return PipelineModel(
            layers=tuple(
                PipelineLayer(
                    _segment_name(graph, number), (*sorted(held[number]), *everywhere), self._segment_runner(number)
                )
                for number in range(len(graph.segments))
            ),
            shared=self.start_forward,
        )

    def _segment_runner(self, number: int) -> Callable[..., Any]:
        def run(hidden: Any, forward: GraphForward, **_inputs: Any) -> Any:
            given = hidden if isinstance(hidden, tuple) else () if hidden is None else (hidden,)
            values: Values = dict(zip(live_values(forward.graph, number), given, strict=True))
            segment = forward.graph.segments[number]
            results = forward.call_segment(number, tuple(values[index] for index in segment.reads))
            values.update(zip(segment.gives, results, strict=True))
            if number == len(forward.graph.segments) - 1:
                return forward.outputs(values)
            passed = tuple(values[index] for index in live_values(forward.graph, number + 1))
            return passed[0] if len(passed) == 1 else passed

        return run


def with_rows(inputs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A batch of this many rows, of the rows of another."""
    given = next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 0)

    def repeat(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == given > 0
        return value[torch.arange(rows, device=value.device) % given] if has_rows else value

    return {key: repeat(value) for key, value in inputs.items()}


def _refuse_without_layers(model: nn.Module, graph: TracedGraph) -> None:
    """Raise for a module that has nothing between which a pipeline could cut it."""
    if not any(segment.owner for segment in graph.segments):
        raise ValueError(
            f"a pipeline cuts a model between the layers that its forward calls, and {type(model).__name__} has no "
            "nn.ModuleList or nn.Sequential of them; list its layers, or use pp=1"
        )


def _refuse_shared_buffers(graph: TracedGraph) -> None:
    """Raise for a buffer that one pipeline layer changes, and another reads: they may lie on different stages.

    What changes with the shared operators does so on every stage.
    """
    buffers: dict[int, set[str]] = {}
    """those that each tensor of the graph, or shared operator, depends on"""
    for index, op in enumerate(graph.ops):
        if op.kind == BUFFER:
            buffers[index] = {str(op.target)}
        elif index in graph.shared:
            buffers[index] = set().union(*(buffers.get(i, set()) for i in op.inputs))
    for number, names in graph.buffer_changes.items():
        for other, segment in enumerate(graph.segments) if number >= 0 else ():
            read = {name for index in segment.ops for i in graph.ops[index].inputs for name in buffers.get(i, ())}
            if found := sorted(read.intersection(names)) if other != number else []:
                raise ValueError(
                    f"{_segment_name(graph, other)} reads the buffer {found[0]}, which changes in "
                    f"{_segment_name(graph, number)}; give each layer a buffer of its own, or use pp=1"
                )


def live_values(graph: TracedGraph, number: int) -> tuple[int, ...]:
    """Results of the segments before one that it, or a later one, reads."""
    made = {index for segment in graph.segments[:number] for index in segment.gives}
    read = {index for segment in graph.segments[number:] for index in segment.reads}
    return tuple(sorted(made & (read | set(graph.user_refs))))


def _segment_name(graph: TracedGraph, number: int) -> str:
    owners = [segment.owner for segment in graph.segments]
    owner = owners[number]
    if owner and owners.count(owner) == 1:
        return owner
    return f"{owner or 'between'}#{number}"


def _modules_of(graph: TracedGraph, number: int) -> tuple[str, ...]:
    """The layer of a segment, and what else it reads: parameters, and modules that stay modules."""
    segment = graph.segments[number]
    names = [segment.owner] if segment.owner else []
    for index in segment.ops:
        op = graph.ops[index]
        used = [str(graph.ops[i].target) for i in op.inputs if graph.ops[i].kind == PARAM]
        used += [str(op.target)] if op.kind == MODULE else []
        names += [name for name in used if not (segment.owner and name.startswith(f"{segment.owner}."))]
    if number == len(graph.segments) - 1:
        names += [str(graph.ops[i].target) for i in graph.output_refs if graph.ops[i].kind == PARAM]
    return tuple(dict.fromkeys(names))


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _signature(inputs: Mapping[str, Any], training: bool) -> Any:
    """Equal for inputs of equal shapes, dtypes and devices."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    others = sorted((name, repr(value)) for name, value in inputs.items() if name not in tensors)
    return training, *others, *sorted((name, t.shape, str(t.dtype), str(t.device)) for name, t in tensors.items())


def _refuse_compiled(model: nn.Module) -> None:
    """Raise for a module that torch.compile has wrapped: its call runs no operators that could be divided."""
    compiled = [name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule"]
    if compiled:
        raise ValueError(
            f"a graph cannot be traced through torch.compile ({compiled[0] or 'the model'} is compiled); give the "
            "module as it was before"
        )


def make_traceable(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Derive a class that can run `model` from its graph; `inputs` are keyword arguments of its forward."""
    from echelon.models.foreign.causal_lm import derive_class

    if isinstance(model, GraphModel):
        return model
    _refuse_compiled(model)
    template = tracing_template(model)
    for name in listed_layers(model):
        derive_class(model.get_submodule(name), GraphLayer)
    derived = derive_class(model, GraphModel)
    derived._template = (template,)
    derived.example_inputs = with_rows(inputs, EXAMPLE_ROWS)
    derived._graphs, derived._runners, derived._constants = {}, {}, {}
    return derived
