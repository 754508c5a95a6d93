"""The layers of a transformers model and what surrounds them, run one by one (layer_probe.py finds them).

[Note: a forward in three parts]

transformers' forward is one function: it embeds, prepares what every layer reads (masks, rotary tables, positions),
calls the layers, applies the last norm and the head. Its parts run without a change to it, on a shallow copy of the
model ("shell") whose layers are stubs:

    embedding    the stub of the first layer keeps its input and ends the forward
    context      given zero embeddings, each stub keeps the keyword arguments of its layer and passes its input on
    head         the stub of the last layer returns given hidden states; norm, head and what follows run as written

In the second and third, modules before the layers are stubs as well: a later pipeline stage does not hold them. The
head can be a stub too, which ends the forward at its input, or starts from given logits. A shell shares every other
module and parameter with the model, and is made anew at each use, since parallelism replaces modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.foreign.functional_dropout import counter_dropout
from echelon.models.forward_parts.module_shell import Call, PartReached, Stub, make_shell, shallow_copy

HIDDEN = "hidden_states"
"""the keyword by which transformers passes a layer's input"""


@dataclass(frozen=True)
class LayerCall:
    """What the model passes to one layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_keyword: bool
    """the hidden states are passed as `hidden_states=`"""
    shape: tuple[int, ...] = ()
    """of the hidden states"""

    def named(self) -> dict[str, Any]:
        """Every argument by its name or place."""
        return {**{f"argument {index + 1}": value for index, value in enumerate(self.args)}, **self.kwargs}

    def run(self, layer: Call, hidden: Tensor) -> Tensor:
        """Return the hidden states that the layer gives."""
        output = self.output(layer, hidden)
        return first_output(output)

    def output(self, layer: Call, hidden: Tensor) -> Any:
        if self.by_keyword:
            return layer(*self.args, hidden_states=hidden, **self.kwargs)
        return layer(hidden, *self.args, **self.kwargs)


@dataclass(frozen=True)
class LayerStack:
    """Where the layers of a model are, and what surrounds them."""

    path: str
    """of the module list"""
    num_layers: int
    output_type: type
    """what a layer returns: a tensor, or a tuple or list that begins with one"""
    output_length: int
    """of the tuple or list"""
    before: tuple[str, ...]
    """modules that are called before the first layer"""
    after: tuple[str, ...]
    """modules that are called after the last"""
    added_sizes: Mapping[str, int]
    """modules before the layers that look vectors up: their size"""
    attributes: tuple[Mapping[str, Any], ...]
    """plain attributes of each layer, which a forward may read of a layer that another stage holds"""
    embedding_size: int
    """of the vectors that the forward takes as `inputs_embeds`"""
    hidden_shape: tuple[int, ...]
    """of what the last layer returns for one token"""
    tables: tuple[str, ...]
    """modules outside the layers that are not trained, such as rotary tables, which every stage holds"""
    dropouts: tuple[tuple[float, ...], ...]
    """probabilities of the dropouts that each layer calls as functions, and last of those around the layers"""
    dropouts_before: int
    """how many of the last come before the layers"""
    attention_calls: tuple[Mapping[str, Mapping[str, Any]], ...]
    """for each layer, the modules that attend through transformers' interface, and the options of their calls"""
    attention_dropouts: tuple[tuple[int, ...], ...]
    """for each layer, which of `dropouts` drop attention probabilities"""
    takes_positions: bool
    """the model's forward has an argument `position_ids`"""
    fused: Mapping[str, tuple[int, ...]]
    """linears of which a layer cuts the output into parts: the parts' sizes (unfuse.py)"""
    head_name: str = ""
    """the module that gives logits"""
    carried: tuple[str, ...] = ()
    """arguments of layers, beside the hidden states, that the loss has a gradient with respect to"""
    needs_tokens: bool = False
    """the forward reads tokens even where it is given their embeddings"""
    problem: str = ""
    """why layers cannot run one by one, if so"""

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{index}" for index in range(self.num_layers))

    # -- parts of the forward -----------------------------------------------------------------------------------------

    def embed(self, model: nn.Module, **inputs: Any) -> Tensor:
        """Return the input of the first layer."""
        reached: list[Tensor] = []

        def first(*args: Any, **kwargs: Any) -> Any:
            reached.append(split_hidden(args, kwargs)[0])
            raise PartReached

        with counter_dropout(model):
            self._run(self._shell(model, [first], self._table_copies(model)), inputs)
        return reached[0]

    def contexts(
        self,
        model: nn.Module,
        like: Tensor,
        tokens: Tensor | None = None,
        *,
        tables: Mapping[str, nn.Module] | None = None,
        **inputs: Any,
    ) -> list[LayerCall]:
        """Return what each layer is called with, given [rows, tokens, ...] zeros in place of embeddings.

        `tables` stand in for some of the model's.
        """
        calls: list[LayerCall] = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            hidden, call = split_hidden(args, kwargs)
            calls.append(call)
            if len(calls) == self.num_layers:
                raise PartReached
            return self._layer_output(hidden)

        with counter_dropout(model, skipped=self.dropouts_before):
            shell = self._shell(model, [keep] * self.num_layers, {**self._stubs(like), **(tables or {})})
            self._run(shell, {**inputs, **self._embedded(like, tokens)})
        return calls

    def head(self, model: nn.Module, hidden: Tensor, **inputs: Any) -> Any:
        """Return the model's output for the hidden states after the last layer."""

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return self._layer_output(split_hidden(args, kwargs)[0])

        def last(*_args: Any, **_kwargs: Any) -> Any:
            return self._layer_output(hidden)

        zeros = hidden.new_zeros(*hidden.shape[:2], self.embedding_size)  # code may add to it in place
        stubs = self._table_copies(model) | self._stubs(hidden)
        shell = self._shell(model, [pass_on] * (self.num_layers - 1) + [last], stubs)
        with counter_dropout(model, skipped=self.dropouts_before):
            return self._run(shell, {**inputs, **self._embedded(zeros, None)})

    def head_input(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Return what the head is given, for the hidden states after the last layer."""
        reached: list[Tensor] = []
        stubbed = self._with_head(model, _ends_at(reached))
        self.head(stubbed, hidden)
        return reached[0]

    def head_input_as_written(self, model: nn.Module, **inputs: Any) -> Tensor:
        """Return what the head is given, from the model's forward with all its layers."""
        reached: list[Tensor] = []
        self._run(self._with_head(model, _ends_at(reached)), inputs)
        return reached[0]

    def finish_logits(self, model: nn.Module, logits: Tensor) -> Tensor:
        """Return what the model makes of its head's output [rows, tokens, words]."""
        hidden = logits.new_zeros(*logits.shape[:-1], *self.hidden_shape)
        stubs = {name: _PassOn() for name in self.after if not f"{self.head_name}.".startswith(f"{name}.")}
        stubbed = self._with_head(model, lambda *_args, **_kwargs: logits, stubs)
        out: Tensor = self.head(stubbed, hidden).logits
        return out

    def run_after_base(self, model: nn.Module, output: Any, logits: Tensor, **inputs: Any) -> Any:
        """Return what the model makes of an output of its base model, and of its head."""
        base = Stub(lambda *_args, **_kwargs: output, {})
        stubbed = self._with_head(model, lambda *_args, **_kwargs: logits)
        return self._run(make_shell(stubbed, {str(model.base_model_prefix): base}), inputs)

    def _with_head(self, model: nn.Module, call: Call, stubs: Mapping[str, nn.Module] | None = None) -> nn.Module:
        """The model with a head that does something else."""
        head: Any = shallow_copy(model.get_submodule(self.head_name))
        head.__class__ = type("StubHead", (_HeadStub, type(head)), {"call": staticmethod(call)})
        return make_shell(model, {**(stubs or {}), self.head_name: head})

    def _run(self, shell: nn.Module, inputs: Mapping[str, Any]) -> Any:
        try:
            return shell.forward_as_written(**inputs, use_cache=False)  # type: ignore[operator]
        except PartReached:
            return None

    def _embedded(self, zeros: Tensor, tokens: Tensor | None) -> dict[str, Tensor]:
        """The input of a forward whose embeddings are zeros."""
        if not self.needs_tokens:
            return {"inputs_embeds": zeros}
        return {"input_ids": zeros.new_zeros(zeros.shape[:2], dtype=torch.int64) if tokens is None else tokens}

    def _layer_output(self, hidden: Tensor) -> Any:
        if issubclass(self.output_type, Tensor):
            return hidden
        output = [hidden, *[None] * (self.output_length - 1)]
        return tuple(output) if self.output_type is tuple else output

    def _table_copies(self, model: nn.Module) -> dict[str, nn.Module]:
        """Tables that grow with the sequence stay as the layers had them, whatever part of it another part is given."""
        tables = [(name, module) for name, module in model.named_modules() if name in self.tables]
        return {name: shallow_copy(table) for name, table in tables if any(True for _ in table.buffers())}

    def _stubs(self, like: Tensor) -> dict[str, nn.Module]:
        """Stubs of the modules before the layers."""
        sizes = self.added_sizes
        return {name: _Zeros(like, sizes[name]) if name in sizes else _PassOn() for name in self.before}

    def _shell(self, model: nn.Module, calls: Sequence[Call], stubs: Mapping[str, nn.Module]) -> nn.Module:
        calls = [*calls, *[_unreached] * (self.num_layers - len(calls))]
        layers = nn.ModuleList(Stub(call, known) for call, known in zip(calls, self.attributes, strict=True))
        return make_shell(model, {**stubs, self.path: layers})


def _ends_at(reached: list[Tensor]) -> Call:
    """A call that keeps its input and ends the forward."""

    def end(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        reached.append(hidden)
        raise PartReached

    return end


class _HeadStub(nn.Module):
    """Stands in for the head, before its class: code may read the head's attributes."""

    call: Call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Zeros(nn.Module):
    """Stands in for an embedding: zeros for each index, or a zero vector that broadcasts."""

    def __init__(self, like: Tensor, size: int):
        super().__init__()
        self.weight = like.new_empty(0, size)
        """models read its dtype and device"""

    def forward(self, *args: Any, **_kwargs: Any) -> Tensor:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        indices = (1, 1) if first is None else first.shape[:-1] if first.dim() == 3 else first.shape
        return self.weight.new_zeros(*indices, self.weight.shape[1])


class _PassOn(nn.Module):
    """Stands in for a norm or a projection before the layers."""

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return x


def _unreached(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("a layer was called after the end of a part")


def split_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, LayerCall]:
    """The hidden states, and the rest of a layer's arguments."""
    if args:
        return args[0], LayerCall(args[1:], kwargs, by_keyword=False, shape=tuple(args[0].shape))
    hidden = kwargs[HIDDEN]
    others = {key: value for key, value in kwargs.items() if key != HIDDEN}
    return hidden, LayerCall((), others, by_keyword=True, shape=tuple(hidden.shape))


def first_output(output: Any) -> Tensor:
    """The hidden states among what a layer returns."""
    first: Tensor = output[0] if isinstance(output, tuple | list) else output
    return first


def own_class(model: nn.Module) -> Any:
    """The class of transformers that an adapted model had."""
    return type(model).__bases__[-1]
