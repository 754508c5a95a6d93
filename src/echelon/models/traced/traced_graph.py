"""`TracedGraph`: the operators of one forward of a module, in the order in which they run.

[Note: segments]

The operators inside one layer of the model are a segment; so are those between two layers. A segment runs through its
layer's own `__call__`, so that what hooks a layer (parameter groups of ZeRO-3, activation checkpointing) finds it, and
segments are what pipeline stages consist of. A layer that the forward calls twice has two segments.

    shared | embed | layer 0    | layer 1    | ... | norm, head, loss
           | ""    | "blocks.0" | "blocks.1" |     | ""                 the owner of each segment

What depends on no parameter (positions, masks, rotary tables) is no part of a segment: it is shared. Every pipeline
stage computes it from the inputs, so that it is never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

PARAM, BUFFER, CONSTANT, INPUT, CALL, MODULE = "param", "buffer", "constant", "input", "call", "module"
"""kinds of operators; those before CALL only give a tensor"""


@dataclass(frozen=True)
class ValueRef:
    """The result of an operator, as an argument of another."""

    index: int


@dataclass(frozen=True, kw_only=True)
class TracedOp:
    """One operator, or one tensor that enters the graph."""

    name: str
    kind: str
    target: Callable[..., Any] | str
    """what a CALL calls; the name of the parameter, buffer, input or module; the key of a constant"""
    args: tuple[Any, ...] = ()
    """with a `ValueRef` in the place of each tensor"""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    layer: str = ""
    """the layer whose forward called it; empty outside of layers"""
    module: str = ""
    """the innermost module whose forward called it"""
    shape: tuple[int, ...] = ()
    """of its result, or of the first of several"""
    num_elements: int = 1
    """of all its results"""
    dtype: torch.dtype = torch.float32
    is_differentiable: bool = False
    """its result depends on a parameter, by operators with a derivative"""

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The operators whose results it reads, each once, in order."""
        return tuple(dict.fromkeys(_refs((self.args, self.kwargs))))

    @property
    def op(self) -> str:
        """What it computes, in a word: `linear`, `add`."""
        if self.kind != CALL:
            return self.kind
        name: str = getattr(self.target, "__name__", str(self.target))
        return name.partition(".")[0]


def _refs(value: Any) -> Iterator[int]:
    if isinstance(value, ValueRef):
        yield value.index
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _refs(item)


def replace_refs(value: Any, resolve: Callable[[int], Any]) -> Any:
    """The same arguments with the value of each reference."""
    if isinstance(value, ValueRef):
        return resolve(value.index)
    if isinstance(value, tuple):
        items = tuple(replace_refs(item, resolve) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else items
    if isinstance(value, list):
        return [replace_refs(item, resolve) for item in value]
    if isinstance(value, Mapping):
        return {key: replace_refs(item, resolve) for key, item in value.items()}
    return value


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive operators of one layer, or between layers. See [Note: segments]."""

    owner: str
    """the layer; empty between layers"""
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    """results of other segments that it reads"""
    gives: tuple[int, ...]
    """its results that later segments, or the outputs, read"""


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """The operators of one forward, for inputs of one signature."""

    ops: tuple[TracedOp, ...]
    outputs: Any
    """what the forward returns, with a `ValueRef` in the place of each tensor"""
    mutated_buffers: Mapping[str, int] = field(default_factory=dict)
    """buffers that the forward changes, and the operator with the new value"""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    calls: tuple[Any, ...] = ()
    """calls of modules that run as they are (module_call.py)"""

    @cached_property
    def user_refs(self) -> tuple[int, ...]:
        """Results that the forward returns."""
        return tuple(dict.fromkeys(_refs(self.outputs)))

    @cached_property
    def output_refs(self) -> tuple[int, ...]:
        """The same, and the new values of buffers."""
        return tuple(dict.fromkeys((*self.user_refs, *self.mutated_buffers.values())))

    @cached_property
    def buffer_changes(self) -> dict[int, tuple[str, ...]]:
        """The buffers that change when each segment runs, by its number; -1: with what the segments share.

        A new value that depends on no parameter is shared, yet it changes its buffer with the layer that has it: each
        stage of a pipeline computes all that is shared.
        """
        found: dict[int, tuple[str, ...]] = {}
        for name, index in self.mutated_buffers.items():
            own = (
                number
                for number, segment in enumerate(self.segments)
                if index in segment.ops or (index in self.shared and name.startswith(f"{segment.owner or name}."))
            )
            number = next(own, -1)
            found[number] = (*found.get(number, ()), name)
        return found

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Calls that depend on no parameter, in order."""
        depends: set[int] = set()
        for index, op in enumerate(self.ops):
            if op.kind == PARAM or (op.kind == MODULE and op.is_differentiable) or depends.intersection(op.inputs):
                depends.add(index)
        return tuple(i for i, op in enumerate(self.ops) if op.kind in (CALL, MODULE) and i not in depends)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The operators in runs of one layer. See [Note: segments]."""
        runs: list[tuple[str, list[int]]] = []
        shared = set(self.shared)
        for index, op in enumerate(self.ops):
            if op.kind in (CALL, MODULE) and index not in shared:
                if not runs or runs[-1][0] != op.layer:
                    runs.append((op.layer, []))
                runs[-1][1].append(index)
        produced_in = {index: number for number, (_, ops) in enumerate(runs) for index in ops}
        read_by = dict.fromkeys(self.user_refs, len(runs))  # the last segment that reads each
        for index, number in produced_in.items():
            for source in self.ops[index].inputs:
                read_by[source] = max(read_by.get(source, 0), number)
        return tuple(
            Segment(
                owner=owner,
                ops=tuple(ops),
                reads=tuple(
                    dict.fromkeys(
                        source
                        for index in ops
                        for source in self.ops[index].inputs
                        if source in produced_in and produced_in[source] != number
                    )
                ),
                gives=tuple(index for index in ops if read_by.get(index, -1) > number),
            )
            for number, (owner, ops) in enumerate(runs)
        )

    def signature(self) -> tuple[tuple[str, str], ...]:
        """Equal for graphs of the same operators, whatever their sizes."""
        return tuple((op.kind, op.target if isinstance(op.target, str) else op.op) for op in self.ops)
