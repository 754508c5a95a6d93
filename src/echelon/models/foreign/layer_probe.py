"""Finds the layers of a transformers model: one forward of it on the meta device, which computes nothing.

The forward shows in which order the model calls its modules, what its layers return, which of them drop values or cut
the output of a linear in functions that no module is, and how they attend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models.foreign.functional_dropout import RecordDropoutCalls
from echelon.models.foreign.layer_stack import LayerStack, own_class, split_hidden
from echelon.models.foreign.unfuse import RecordCuts, is_linear
from echelon.models.forward_parts.module_shell import plain_attributes

PROBE_ATTENTION = "echelon_shapes_only"
PROBE_ROWS, PROBE_TOKENS = 2, 6


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
    record = _LayerProbe(model, path, len(layers))
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
        attributes=tuple(plain_attributes(layer) for layer in layers),
        hidden_size=record.hidden_size,
        tables=tuple(_without_parameters(model, path)),
        dropouts=tuple(map(tuple, record.dropouts)),
        attention_calls=tuple(record.attention_calls),
        attention_dropouts=tuple(map(tuple, record.attention_dropouts)),
        takes_positions="position_ids" in inspect.signature(own_class(model).forward).parameters,
        fused=record.cuts.parts(),
        head_name=_head_name(model),
    )


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules(remove_duplicate=False) if module is head), "")


def _without_parameters(model: nn.Module, path: str) -> Iterator[str]:
    """Names of the outermost modules without parameters, but for those of the layers."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = name == path or any(name.startswith(f"{other}.") for other in (path, *outer))
        if name and not inside and not any(True for _ in module.parameters()):
            outer.append(name)
            yield name


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's matrices are all of linears: no convolutions, states or experts."""
    if any(True for _ in module.parameters(recurse=False)):
        return False
    others = [child for child in module.modules() if not is_linear(child)]
    return not any(p.dim() > 1 for child in others for p in child.parameters(recurse=False))


class _LayerProbe:
    """The order in which a model calls its layers and the modules around them."""

    def __init__(self, model: nn.Module, path: str, num_layers: int):
        self.model, self.path, self.num_layers = model, path, num_layers
        self.layer_calls: list[int] = []
        self.before: list[str] = []
        self.after: list[str] = []
        self.added_sizes: dict[str, int] = {}
        self.returns_tuple, self.hidden_size = False, 0
        self.dropouts: list[list[float]] = []
        self.recorder, self.cuts = RecordDropoutCalls(), RecordCuts()
        self.attention_calls: list[dict[str, dict[str, Any]]] = []
        self.attention_dropouts: list[list[int]] = []
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
            self.recorder = RecordDropoutCalls()
            self.dropouts = [[] for _ in range(self.num_layers + 1)]
            self.attention_calls = [{} for _ in range(self.num_layers)]
            self.attention_dropouts = [[] for _ in range(self.num_layers)]
            self.cuts = RecordCuts()
            chosen = implementations(config, attention=attention, experts="batched_mm")
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
        return lambda _module, _args, output: self.cuts.track(name, output)

    def _before_layer(self, _module: nn.Module, _args: Any) -> None:
        self.dropouts[-1] += self.recorder.calls
        self.recorder.calls = []

    def _after_layer(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.layer_calls.append(index)
            self.dropouts[index], self.recorder.calls = self.recorder.calls, []
            self.returns_tuple = isinstance(output, tuple)
            self.hidden_size = split_hidden(args, kwargs)[0].shape[-1]

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
