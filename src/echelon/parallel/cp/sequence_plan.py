"""Finds how context parallelism divides the sequences of a foreign model's layers, and proves it: `SequencePlan`.

[Note: where tokens meet]

    core        a layer attends once, through transformers' attention interface, and a core computes the same
    gathered    a child of the layer mixes tokens in another way: attention of its own, convolutions, recurrent states.
                It gets the full sequence on every rank, and keeps the rank's tokens (sequence_gather.py)
    layer       tokens meet outside of the layer's children, or in a way that no trial follows: the layer gets the full
                sequence

1. Every kind of layer runs once, in float64 with random weights and a few tokens, on a twin of the model whose windows,
   and other numbers of tokens, are less than these: what a mask hides, it hides in the trial (token_limits.py).
2. With a core instead of its own attention function, the layer must give the same. Else its children that mix tokens
   are gathered: those in which one token changes the output for another.
3. Then the layer runs on some of the tokens, as on a rank. The core, or the gathered children, must be given what they
   were given for these tokens before, and return what they returned; the layer's output must be what it was. If it is
   not, the next form is tried: what a layer does between its children is not assumed either.

The embedding runs on some of the tokens too, given their positions. Where it gives something else, it is gathered.
Where gathering can be avoided if rotary tables are given the positions of all tokens, they are (full_tables.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.attention import AttentionContext, CoreAttention
from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.foreign.core_attention import CONTEXT_ARGUMENT, CORE_ATTENTION, install_core
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.full_tables import FullTable
from echelon.models.foreign.layer_probe import implementations
from echelon.models.foreign.layer_stack import LayerCall
from echelon.models.forward_parts.module_shell import make_shell
from echelon.parallel.cp.token_limits import SHORT, find_token_limits, shorten
from echelon.parallel.tp.derive_regions import layer_signature, random_copy
from echelon.parallel.tp.shrunken_twin import shrunken_twin

ROWS, TOKENS = 2, 9
SOME = (1, 2, 4, 6)
"""the tokens of one rank, which has not the last"""
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """How the layers of a foreign model reach the tokens of other ranks. Names are those of modules."""

    cores: tuple[str, ...] = ()
    """attention modules whose function a core computes"""
    gathered: tuple[str, ...] = ()
    """modules that get full sequences on every rank: children of layers, or layers"""
    gathers_embedding: bool = False
    """the embedding gets full sequences"""
    gathers_positions: bool = False
    """tables outside of the layers get the positions of full sequences"""
    problem: str = ""
    """why sequences cannot be divided at all"""

    def gathered_layers(self, model: ForeignCausalLM) -> tuple[int, ...]:
        """The indices of layers with a gathered module."""
        names = model.layer_stack.layer_names
        return tuple(
            index
            for index, name in enumerate(names)
            if any(other == name or other.startswith(f"{name}.") for other in self.gathered)
        )


def plan_sequences(model: ForeignCausalLM) -> SequencePlan:
    """Find what every rank finds: the weights of a trial are those of a fixed seed."""
    if not model.logit_map.divides_tokens:
        return SequencePlan(problem="its logits of a token depend on other tokens")
    limits, failure = find_token_limits(model.config), ""
    # A class may refuse a short limit. Then each is left out in turn, those of positions are, and at last all are.
    positions = {key for key, value in limits.items() if value == SHORT["position"]}
    for left_out in (set[str](), *({key} for key in limits), positions, set(limits)):
        short = {key: value for key, value in limits.items() if key not in left_out}
        twin = shrunken_twin(model, partial(shorten, limits=short)) or (None if short else model)
        if twin is None:
            continue
        try:
            return _plan(twin)
        except Exception as error:  # whatever a model's code raises
            failure = failure or f"its layers do not run alone ({error})"
    return SequencePlan(problem=failure)


def _plan(twin: ForeignCausalLM) -> SequencePlan:
    was_training = twin.training
    twin.eval()
    try:
        with torch.no_grad(), float64_casts(torch.float64), implementations(twin.config, experts="eager"):
            usual = _plan_layers(twin, gathers_positions=False)
            if not usual.gathered:
                return usual
            other = _plan_layers(twin, gathers_positions=True)
            return other if len(other.cores) > len(usual.cores) else usual
    finally:
        twin.train(was_training)


def _plan_layers(model: ForeignCausalLM, *, gathers_positions: bool) -> SequencePlan:
    every, some = list(range(TOKENS)), list(SOME)
    calls = _calls(model, every, "")  # its own function, as on one device
    try:
        core_calls = _calls(model, every, CORE_ATTENTION)
        some_calls = _calls(model, some, CORE_ATTENTION, gathers_positions=gathers_positions)
    except Exception:  # whatever a model's code raises without masks
        core_calls = some_calls = []
    stack, found, cores, gathered = model.layer_stack, dict[Any, Any](), list[str](), list[str]()
    for index, name in enumerate(stack.layer_names):
        layer, attentions = model.get_submodule(name), stack.attention_calls[index]
        inner = [attention.removeprefix(f"{name}.") for attention in attentions]
        kind = (layer_signature(layer, calls[index]), _of_layer(model.config, index, stack.num_layers), repr(inner))
        if kind not in found:
            trial = _SequenceTrial(layer, calls[index])
            attends_once = len(inner) == 1 and bool(core_calls)
            if attends_once and trial.equals_with_core(inner[0], core_calls[index], some_calls[index]):
                found[kind] = (inner, [])
            else:
                mixing = trial.mixing_children()
                is_alone = mixing == [] and bool(core_calls) and trial.equals_alone(some_calls[index])
                found[kind] = ([], [] if is_alone else mixing or [""])
        attending, mixing = found[kind]
        cores += [f"{name}.{child}" for child in attending]
        gathered += [f"{name}.{child}".rstrip(".") for child in mixing]
    return SequencePlan(
        cores=tuple(cores),
        gathered=tuple(gathered),
        gathers_embedding=not _embeds_alone(model),
        gathers_positions=gathers_positions,
    )


def _calls(
    model: ForeignCausalLM, positions: Sequence[int], attention: str, *, gathers_positions: bool = False
) -> list[LayerCall]:
    stack, tokens = model.layer_stack, _tokens(model)[:, positions]
    like = torch.zeros(ROWS, len(positions), stack.embedding_size, dtype=torch.float64)
    tables: dict[str, nn.Module] = {name: random_copy(model.get_submodule(name)) for name in stack.tables}
    if gathers_positions:
        tables = {name: FullTable(table, _TrialSequences()) for name, table in tables.items()}
    with implementations(model.config, attention=attention):
        return stack.contexts(model, like, tokens, tables=tables, **_position_ids(model, positions))


def _tokens(model: ForeignCausalLM) -> Tensor:
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    return torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) * 7 % size


def _position_ids(model: ForeignCausalLM, positions: Sequence[int]) -> dict[str, Tensor]:
    is_usual = list(positions) == list(range(len(positions)))
    if is_usual or not model.layer_stack.takes_positions:
        return {}
    return {"position_ids": torch.tensor([positions] * ROWS)}


class _TrialSequences:
    """All tokens of the trial, of which a rank has some."""

    length, local_length = TOKENS, len(SOME)

    def gather(self, x: Tensor) -> Tensor:
        if not torch.equal(x, torch.tensor([SOME] * len(x))):
            raise ValueError("a table is called with something else than positions")
        return torch.arange(TOKENS).expand(len(x), -1)

    def keep(self, x: Tensor, dim: int = 1) -> Tensor:
        return x.index_select(dim, torch.tensor(SOME))

    def run_full(self, call: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return self.keep(call(*map(self.gather, args)))


def _of_layer(config: Any, index: int, num_layers: int) -> tuple[Any, ...]:
    """What lists of the config say of one layer."""
    lists = (value for value in vars(config).values() if isinstance(value, list | tuple))
    return tuple(repr(value[index]) for value in lists if len(value) == num_layers)


def _embeds_alone(model: ForeignCausalLM) -> bool:
    """Whether some tokens are embedded as they are among the others."""
    stack, tokens = model.layer_stack, _tokens(model)
    before = {name: random_copy(model.get_submodule(name)) for name in (*stack.before, *stack.tables)}
    shell = make_shell(model, before)
    whole = stack.embed(shell, input_ids=tokens)
    try:
        part = stack.embed(shell, input_ids=tokens[:, list(SOME)], **_position_ids(model, SOME))
    except Exception:  # whatever a model's code raises for fewer tokens
        return False
    return _close(part, whole[:, list(SOME)])


class _SequenceTrial:
    """One layer with random weights, on all tokens and on some."""

    def __init__(self, layer: nn.Module, call: LayerCall):
        generator = torch.Generator().manual_seed(2)
        self.hidden = torch.randn(call.shape, dtype=torch.float64, generator=generator)
        self.layer, self.call = random_copy(layer), call
        self.children: dict[str, _ChildCall] = {}
        handles = [
            child.register_forward_hook(self._record(name), with_kwargs=True)
            for name, child in self.layer.named_children()
        ]
        self.whole = call.run(self.layer, self.hidden)
        for handle in handles:
            handle.remove()

    def _record(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            dims = self.hidden.dim()
            given = tuple(_copy_hidden(value, dims) for value in args)
            named = {key: _copy_hidden(value, dims) for key, value in kwargs.items()}
            parts = output if isinstance(output, tuple) else (output,)
            results = (_copy_hidden(parts[0], dims), *parts[1:])
            self.children[name] = _ChildCall(
                given, named, results, isinstance(output, tuple), name not in self.children, dims
            )

        return hook

    # -- a core -------------------------------------------------------------------------------------------------------

    def equals_with_core(self, attention: str, call: LayerCall, some: LayerCall) -> bool:
        """Whether the layer computes the same with a core, and on some tokens with what the core gave for them."""
        layer = copy.deepcopy(self.layer)
        core = install_core(layer, layer.get_submodule(attention), nn.Dropout(0.0))
        core.backend = recording = _RecordedCore()
        try:
            if not _close(self._run(call, layer, range(TOKENS)), self.whole):
                return False
            recording.some = list(SOME)
            return _close(self._run(some, layer, SOME), self.whole[:, list(SOME)])
        except Exception:  # whatever a module's code raises for what it does not expect
            return False

    def _run(self, call: LayerCall, layer: nn.Module, tokens: Sequence[int]) -> Tensor:
        context = AttentionContext(torch.tensor([list(tokens)]))
        with_context = LayerCall(call.args, {**call.kwargs, CONTEXT_ARGUMENT: context}, call.by_keyword)
        return with_context.run(layer, self.hidden[:, list(tokens)])

    # -- gathered children --------------------------------------------------------------------------------------------

    def equals_alone(self, some: LayerCall) -> bool:
        """Whether the layer computes the same on some of the tokens."""
        try:
            part = some.run(self.layer, self.hidden[:, list(SOME)])
        except Exception:  # whatever a module's code raises for what it does not expect
            return False
        return _close(part, self.whole[:, list(SOME)])

    def mixing_children(self) -> list[str] | None:
        """The children that get full sequences; None if the layer does not compute the same with them."""
        mixing = [name for name, called in self.children.items() if called.mixes(self.layer.get_submodule(name))]
        layer = copy.deepcopy(self.layer)
        for name in mixing:
            layer.get_submodule(name).forward = self.children[name].replay
        try:
            part = self.call.run(layer, self.hidden[:, list(SOME)])
        except Exception:  # whatever a module's code raises for what it does not expect
            return None
        return mixing if _close(part, self.whole[:, list(SOME)]) else None


class _RecordedCore:
    """An attention backend: all tokens first, then some, whose queries, keys and values must be what they were."""

    def __init__(self) -> None:
        self.some: list[int] = []
        self.calls: list[tuple[Tensor, ...]] = []

    def attend(
        self,
        core: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not self.some:
            self.calls.append((q, k, v, core.local_attention(q, k, v, context, sinks)))
            return self.calls[-1][-1]
        *qkv, out = self.calls.pop(0)
        for given, before in zip((q, k, v), qkv, strict=True):
            if not _close(given, before[:, :, self.some]):
                raise ValueError("queries, keys or values depend on other tokens")
        return out[:, :, self.some]


@dataclass(frozen=True)
class _ChildCall:
    """What a child of a layer was called with for all tokens, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Any, ...]
    returns_tuple: bool
    is_only: bool
    """the layer called it once"""
    dims: int
    """of the layer's hidden states"""

    def mixes(self, child: nn.Module) -> bool:
        """Whether another input for one token changes the output for other tokens."""
        if not self.is_only:
            return True
        one, others = TOKENS // 2, [index for index in range(TOKENS) if index != TOKENS // 2]

        def change(x: Any) -> Any:
            if not is_hidden(x, TOKENS, self.dims):
                return x
            return x + torch.eye(TOKENS, dtype=x.dtype)[one].view(1, -1, *[1] * (x.dim() - 2))

        changed = child(*map(change, self.args), **{key: change(value) for key, value in self.kwargs.items()})
        before, after = map(_unflatten, (self.results[0], changed[0] if self.returns_tuple else changed))
        if not is_hidden(before, TOKENS, self.dims):
            return True
        return not _close(after[:, others], before[:, others])

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Give some of the tokens what they got, if they come with the inputs that they had."""
        some = list(SOME)
        for given, before in (*zip(args, self.args, strict=True), *_by_name(kwargs, self.kwargs)):
            if is_hidden(before, TOKENS, self.dims) and not _close(given, before[:, some]):
                raise ValueError("a gathered module would be given something else")
        first = self.results[0][:, some]
        return (first, *self.results[1:]) if self.returns_tuple else first


def is_hidden(x: Any, tokens: int, dims: int) -> bool:
    """Whether an argument is [sequences, tokens, ...] values that a layer has computed of its tokens.

    Hidden states may have dimensions of their own (`dims` in all), such as residual streams."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() in (3, dims) and x.shape[1] == tokens


def _unflatten(x: Any) -> Any:
    """Experts may return their tokens as one list."""
    return x.unflatten(0, (ROWS, TOKENS)) if isinstance(x, Tensor) and len(x) == ROWS * TOKENS else x


def _by_name(given: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((given[key], value) for key, value in before.items())


def _copy_hidden(x: Any, dims: int) -> Any:
    """A layer may change what it passed on, or got, in place."""
    return x.clone() if is_hidden(x, TOKENS, dims) else x


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * max(1.0, float(b.abs().max())))
