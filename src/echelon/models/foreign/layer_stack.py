"""The layers of a transformers model, found by running it once on the meta device, and run one by one.

[Note: a forward in three parts]

transformers' forward is one function: it embeds, prepares what every layer reads (masks, rotary tables, positions),
calls the layers, applies the last norm and the head. Its parts run without a change to it, on a shallow copy of the
model ("shell") whose layers are stubs:

    embedding    the stub of the first layer keeps its input and ends the forward
    context      given zero embeddings, each stub keeps the keyword arguments of its layer and passes its input on
    head         the stub of the last layer returns given hidden states; norm, head and what follows run as written

In the second and third, modules before the layers are stubs as well: a later pipeline stage does not hold them. A
shell shares every other module and parameter with the model, and is made anew at each use, since parallelism replaces
modules.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models.foreign.functional_dropout import RecordDropoutCalls
from echelon.models.foreign.unfuse import RecordCuts, is_linear

Call = Callable[..., Any]
PROBE_ATTENTION = "echelon_shapes_only"
PROBE_ROWS, PROBE_TOKENS = 2, 6


class _LayersReached(Exception):  # noqa: N818: not an error, but the end of a part
    """Ends a forward at a stub."""


@dataclass(frozen=True)
class LayerCall:
    """What the model passes to one layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_keyword: bool
    """the hidden states are passed as `hidden_states=`"""

    def run(self, layer: Call, hidden: Tensor) -> Tensor:
        if self.by_keyword:
            output = layer(*self.args, hidden_states=hidden, **self.kwargs)
        else:
            output = layer(hidden, *self.args, **self.kwargs)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first


@dataclass(frozen=True)
class LayerStack:
    """Where the layers of a model are, and what surrounds them."""

    path: str
    """of the module list"""
    num_layers: int
    returns_tuple: bool
    before: tuple[str, ...]
    """modules that are called before the first layer"""
    after: tuple[str, ...]
    """modules that are called after the last"""
    added_sizes: Mapping[str, int]
    """modules before the layers that look vectors up: their size"""
    attributes: tuple[Mapping[str, Any], ...]
    """plain attributes of each layer, which a forward may read of a layer that another stage holds"""
    hidden_size: int
    tables: tuple[str, ...]
    """modules without parameters outside the layers, such as rotary tables, which every stage holds"""
    dropouts: tuple[tuple[float, ...], ...]
    """probabilities of the dropouts that each layer calls as functions, and last of those around the layers"""
    attention_calls: tuple[Mapping[str, Mapping[str, Any]], ...]
    """for each layer, the modules that attend through transformers' interface, and the options of their calls"""
    attention_dropouts: tuple[tuple[int, ...], ...]
    """for each layer, which of `dropouts` drop attention probabilities"""
    takes_positions: bool
    """the model's forward has an argument `position_ids`"""
    fused: Mapping[str, tuple[int, ...]]
    """linears of which a layer cuts the output into parts: the parts' sizes (unfuse.py)"""

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{index}" for index in range(self.num_layers))

    # -- parts of the forward -----------------------------------------------------------------------------------------

    def embed(self, model: nn.Module, **inputs: Any) -> Tensor:
        """Return the input of the first layer."""
        reached: list[Tensor] = []

        def first(*args: Any, **kwargs: Any) -> Any:
            reached.append(_split_hidden(args, kwargs)[0])
            raise _LayersReached

        self._run(self._shell(model, [first], {}), inputs)
        return reached[0]

    def contexts(self, model: nn.Module, like: Tensor, **inputs: Any) -> list[LayerCall]:
        """Return what each layer is called with, given [rows, tokens, ...] zeros in place of embeddings."""
        calls: list[LayerCall] = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            hidden, call = _split_hidden(args, kwargs)
            calls.append(call)
            if len(calls) == self.num_layers:
                raise _LayersReached
            return (hidden, None) if self.returns_tuple else hidden

        self._run(self._shell(model, [keep] * self.num_layers, self._stubs(like)), {**inputs, "inputs_embeds": like})
        return calls

    def head(self, model: nn.Module, hidden: Tensor, **inputs: Any) -> Any:
        """Return the model's output for the hidden states after the last layer."""

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            given = _split_hidden(args, kwargs)[0]
            return (given, None) if self.returns_tuple else given

        def last(*_args: Any, **_kwargs: Any) -> Any:
            return (hidden, None) if self.returns_tuple else hidden

        zeros = hidden.new_zeros(()).expand(hidden.shape)
        shell = self._shell(model, [pass_on] * (self.num_layers - 1) + [last], self._stubs(hidden))
        return self._run(shell, {**inputs, "inputs_embeds": zeros})

    def _run(self, shell: nn.Module, inputs: Mapping[str, Any]) -> Any:
        try:
            return shell.forward_as_written(**inputs, use_cache=False)  # type: ignore[operator]
        except _LayersReached:
            return None

    def _stubs(self, like: Tensor) -> dict[str, nn.Module]:
        """Stubs of the modules before the layers."""
        sizes = self.added_sizes
        return {name: _Zeros(like, sizes[name]) if name in sizes else _PassOn() for name in self.before}

    def _shell(self, model: nn.Module, calls: Sequence[Call], stubs: Mapping[str, nn.Module]) -> nn.Module:
        calls = [*calls, *[_unreached] * (self.num_layers - len(calls))]
        layers = nn.ModuleList(_Stub(call, known) for call, known in zip(calls, self.attributes, strict=True))
        shell, replaced = _shallow_copy(model), {**stubs, self.path: layers}
        copied = {"": shell}
        for path, module in replaced.items():
            parent = ""
            for name in path.split(".")[:-1]:
                child = f"{parent}.{name}" if parent else name
                if child not in copied:
                    copied[child] = _shallow_copy(copied[parent]._modules[name])
                    copied[parent]._modules[name] = copied[child]
                parent = child
            copied[parent]._modules[path.rpartition(".")[2]] = module
        return shell


class _Stub(nn.Module):
    """Stands in for a layer."""

    def __init__(self, call: Call, attributes: Mapping[str, Any]):
        super().__init__()
        self.__dict__.update(attributes)
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _Zeros(nn.Module):
    """Stands in for an embedding: a zero vector that broadcasts."""

    def __init__(self, like: Tensor, size: int):
        super().__init__()
        self.weight = like.new_empty(0, size)
        """models read its dtype and device"""

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.weight.new_zeros(1, 1, 1)


class _PassOn(nn.Module):
    """Stands in for a norm or a projection before the layers."""

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return x


def _unreached(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("a layer was called after the end of a part")


def _shallow_copy(module: nn.Module | None) -> nn.Module:
    """The same module without its hooks, whose children can be replaced without changing the original."""
    assert module is not None
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__ = dict(module.__dict__)
    copied.__dict__["_modules"] = dict(module._modules)
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            copied.__dict__[name] = OrderedDict()
    return copied


def _split_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, LayerCall]:
    """The hidden states, and the rest of a layer's arguments."""
    if args:
        return args[0], LayerCall(args[1:], kwargs, by_keyword=False)
    others = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return kwargs["hidden_states"], LayerCall((), others, by_keyword=True)


# -- finding the layers -----------------------------------------------------------------------------------------------


def find_layer_stack(model: nn.Module) -> LayerStack:
    """Find the layers of a model on the meta device, by one forward of it, which changes nothing.

    Raises ValueError where there is no list of layers that the model calls one after another.
    """
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    outermost = [(n, m) for n, m in candidates if not any(n.startswith(other + ".") for other, _ in candidates)]
    if not outermost:
        raise ValueError(f"{type(model).__name__} has no list of layers, so that its layers cannot be divided")
    path, layers = max(outermost, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    record = _Probe(model, path, len(layers))
    record.run()
    if record.layer_calls != list(range(len(layers))):
        raise ValueError(f"{type(model).__name__} does not call {path} one after another ({record.layer_calls[:8]})")
    return LayerStack(
        path=path,
        num_layers=len(layers),
        returns_tuple=record.returns_tuple,
        before=tuple(record.before),
        after=tuple(record.after),
        added_sizes=record.added_sizes,
        attributes=tuple(_plain_attributes(layer) for layer in layers),
        hidden_size=record.hidden_size,
        tables=tuple(_without_parameters(model, path)),
        dropouts=tuple(map(tuple, record.dropouts)),
        attention_calls=tuple(record.attention_calls),
        attention_dropouts=tuple(map(tuple, record.attention_dropouts)),
        takes_positions="position_ids" in inspect.signature(type(model).__bases__[-1].forward).parameters,
        fused=record.cuts.parts(),
    )


def _without_parameters(model: nn.Module, path: str) -> Iterator[str]:
    """Names of the outermost modules without parameters, but for those of the layers."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = name == path or any(name.startswith(f"{other}.") for other in (path, *outer))
        if name and not inside and not any(True for _ in module.parameters()):
            outer.append(name)
            yield name


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    plain = (int, float, str, bool, type(None))
    return {key: value for key, value in vars(module).items() if isinstance(value, plain) and not key.startswith("_")}


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's matrices are all of linears: no convolutions, states or experts."""
    if any(True for _ in module.parameters(recurse=False)):
        return False
    others = [child for child in module.modules() if not is_linear(child)]
    return not any(p.dim() > 1 for child in others for p in child.parameters(recurse=False))


class _Probe:
    """The order in which a model calls its layers and the modules around them."""

    def __init__(self, model: nn.Module, path: str, num_layers: int):
        self.model, self.path, self.num_layers = model, path, num_layers
        self.layer_calls: list[int] = []
        self.before: list[str] = []
        self.after: list[str] = []
        self.added_sizes: dict[str, int] = {}
        self.returns_tuple, self.hidden_size = False, 0
        self.dropouts: list[list[float]] = []
        self.names = {module: name for name, module in model.named_modules()}

    def run(self) -> None:
        quiet_dropouts(self.model)
        handles = []
        inner = f"{self.path}."
        for name, module in self.model.named_modules():
            if name.startswith(inner):
                index = name.removeprefix(inner)
                if index.isdigit():
                    handles.append(module.register_forward_pre_hook(self._before_layer))
                    handles.append(module.register_forward_hook(self._after_layer(int(index)), with_kwargs=True))
                elif is_linear(module) and _is_plain(self.model.get_submodule(name.rpartition(".")[0])):
                    handles.append(module.register_forward_hook(self._watch_output(name)))
            elif any(True for _ in module.parameters(recurse=False)) or isinstance(module, _QuietDropout):
                handles.append(module.register_forward_hook(self._after_other(name)))
        try:
            self._forward()
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self) -> None:
        register_shapes_only_attention(self._record_attention)
        tokens = torch.zeros(PROBE_ROWS, PROBE_TOKENS, dtype=torch.int64, device="meta")
        config: Any = self.model.config
        error = None
        # Masks of known attention read values, which tensors on meta do not have; masks of another are left out.
        for attention in (PROBE_ATTENTION, config._attn_implementation):
            self.layer_calls, self.before, self.after, self.added_sizes = [], [], [], {}
            self.recorder, self.dropouts = RecordDropoutCalls(), [[] for _ in range(self.num_layers + 1)]
            self.attention_calls: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.num_layers)]
            self.attention_dropouts: list[list[int]] = [[] for _ in range(self.num_layers)]
            self.cuts, chosen = RecordCuts(), implementations(config, attention=attention, experts="batched_mm")
            try:
                with torch.no_grad(), self.recorder, self.cuts, chosen:
                    self.model.forward_as_written(input_ids=tokens, use_cache=False)  # type: ignore[operator]
                self.dropouts[-1] += self.recorder.calls
                return
            except Exception as raised:  # whatever a model's code raises without values
                error = error or raised
        raise ValueError(f"{type(self.model).__name__} cannot run without values ({error})") from error

    def _record_attention(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        layer, name = len(self.layer_calls), self.names[module]
        self.attention_calls[layer][name] = dict(options)
        if options.get("dropout"):
            self.attention_dropouts[layer].append(len(self.recorder.calls) - 1)

    def _watch_output(self, name: str) -> Callable[..., None]:
        return lambda _module, _args, output: self.cuts.watch(name, output)

    def _before_layer(self, _module: nn.Module, _args: Any) -> None:
        self.dropouts[-1] += self.recorder.calls
        self.recorder.calls = []

    def _after_layer(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.layer_calls.append(index)
            self.dropouts[index], self.recorder.calls = self.recorder.calls, []
            self.returns_tuple = isinstance(output, tuple)
            self.hidden_size = _split_hidden(args, kwargs)[0].shape[-1]

        return hook

    def _after_other(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            part = self.after if self.layer_calls else self.before
            part.append(name)
            if part is self.before and not (args and isinstance(args[0], Tensor) and args[0].shape == output.shape):
                self.added_sizes[name] = int(output.shape[-1])

        return hook


@contextmanager
def implementations(config: Any, *, attention: str = "", experts: str = "") -> Iterator[None]:
    """Choose how a model of transformers computes attention and experts, for a while."""
    wanted = {"_attn_implementation": attention, "_experts_implementation": experts}
    wanted = {key: value for key, value in wanted.items() if value and hasattr(config, key)}
    before = {key: getattr(config, key) for key in wanted}
    for key, value in wanted.items():
        setattr(config, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(config, key, value)


class _QuietDropout(nn.Identity):
    """A dropout that drops nothing."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p


def quiet_dropouts(model: nn.Module) -> None:
    """Make the dropout modules of a model that is thrown away do nothing, so that only calls of functions count."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, _QuietDropout(child.p))


def register_shapes_only_attention(record: Callable[[nn.Module, Mapping[str, Any]], None]) -> None:
    """Register attention for the probe: a result of the right shape, by the function that will drop probabilities."""
    from transformers import AttentionInterface

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **options: Any) -> Any:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=options.get("dropout", 0.0))
        record(module, options)
        return out.transpose(1, 2), None

    AttentionInterface.register(PROBE_ATTENTION, attend)
