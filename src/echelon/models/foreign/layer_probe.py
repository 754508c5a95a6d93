"""Finds the layers of a transformers model: one forward of it on the meta device, which computes nothing.

The forward shows in which order the model calls its modules, what its layers return, which of them drop values or cut
the output of a linear in functions that no module is, and how they attend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models.foreign.functional_dropout import RecordDropoutCalls
from echelon.models.foreign.init_rules import materialize_buffers
from echelon.models.foreign.layer_stack import HIDDEN, LayerStack, first_output, own_class, split_hidden
from echelon.models.foreign.unfuse import RecordCuts, is_linear
from echelon.models.foreign.usual_values import UsualValues
from echelon.models.forward_parts.module_shell import PartReached, plain_attributes

PROBE_ATTENTION = "echelon_shapes_only"
PROBE_ROWS, PROBE_TOKENS = 2, 6
MAX_NUMEL = 1 << 31
"""parameters of a model that runs with values, if nothing else helps"""


def find_layer_stack(model: nn.Module) -> LayerStack:
    """Find the layers of a model on the meta device, by one forward of it, which changes nothing.

    Where no list of layers is called one after another, the stack has no layers, and says why.
    """
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    outermost = [(n, m) for n, m in candidates if not any(n.startswith(other + ".") for other, _ in candidates)]
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    tables = [name for name, module in model.named_modules() if not trainable & set(module.parameters())]
    outermost.sort(key=lambda found: -sum(p.numel() for p in found[1].parameters()))
    called: list[_LayerProbe] = []
    for name, layers in outermost:  # the largest list may be that of images or sounds, which a text does not reach
        record = _LayerProbe(model, name, len(layers), tables)
        record.run()
        if record.layer_calls == list(range(len(layers))):
            others = [other for other, _ in outermost if other != name]
            stack = record.try_parts(_stack_of(model, record), others)
            return replace(stack, takes_positions=stack.takes_positions and record.counts_from_zero())
        called += [record] if record.layer_calls else []
        if record.recorder.draws_scalars and len(record.layer_calls) < len(layers):
            raise ValueError(
                f"{type(model).__name__} skips layers of {name} at random, which ranks would do differently; "
                "set its probability (such as layerdrop) to 0 in config.json"
            )
    whole = _LayerProbe(model, "", 0, tables)
    whole.run()
    problem = "it has no list of layers"
    if called:
        problem = f"it does not call {called[0].path} one after another ({called[0].layer_calls[:8]})"
    return replace(_stack_of(model, whole), problem=problem)


def _stack_of(model: nn.Module, record: _LayerProbe) -> LayerStack:
    layers = list(model.get_submodule(record.path).children()) if record.path else []
    return LayerStack(
        path=record.path,
        num_layers=record.num_layers,
        output_type=record.output_type,
        output_length=record.output_length,
        before=record.around(record.before),
        after=record.around(record.after),
        added_sizes=record.added_sizes,
        attributes=tuple(plain_attributes(layer) for layer in layers),
        embedding_size=_embedding_size(model),
        hidden_shape=record.hidden_shape or (_embedding_size(model),),
        tables=record.tables,
        dropouts=tuple(map(tuple, record.dropouts)),
        dropouts_before=record.dropouts_before,
        attention_calls=tuple(record.attention_calls),
        attention_dropouts=tuple(map(tuple, record.attention_dropouts)),
        takes_positions="position_ids" in inspect.signature(own_class(model).forward).parameters,
        fused=record.cuts.parts(),
        head_name=_head_name(model),
        carried=tuple(sorted(record.carried)),
        problem=record.problem,
    )


def _embedding_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[1])


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules(remove_duplicate=False) if module is head), "")


def outermost_tables(names: list[str], path: str) -> tuple[str, ...]:
    """Names of the outermost modules without trainable parameters, but for those of the layers."""
    outer: list[str] = []
    for name in names:
        inside = name == path or any(name.startswith(f"{other}.") for other in (path, *outer))
        if name and not inside:
            outer.append(name)
    return tuple(outer)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's matrices are all of linears: no convolutions, states or experts."""
    if any(True for _ in module.parameters(recurse=False)):
        return False
    others = [child for child in module.modules() if not is_linear(child)]
    return not any(p.dim() > 1 for child in others for p in child.parameters(recurse=False))


class _LayerProbe:
    """The order in which a model calls its layers and the modules around them."""

    def __init__(self, model: nn.Module, path: str, num_layers: int, tables: list[str]):
        self.model, self.path, self.num_layers, self.tables = model, path, num_layers, outermost_tables(tables, path)
        self.layer_calls: list[int] = []
        self.before: list[str] = []
        self.after: list[str] = []
        self.added_sizes: dict[str, int] = {}
        self.output_type: type = Tensor
        self.output_length = 1
        self.hidden_shape: tuple[int, ...] = ()
        self.carried: set[str] = set()
        self.leaves: dict[str, list[Tensor]] = {}
        """inputs of the layer that runs, beside the hidden states, that carry a gradient"""
        self.given: list[dict[str, Any]] = []
        """arguments of each layer, and the shapes of tensors"""
        self.dropouts: list[list[float]] = []
        self.dropouts_before = 0
        self.recorder, self.cuts = RecordDropoutCalls(), RecordCuts()
        self.attention_calls: list[dict[str, dict[str, Any]]] = []
        self.attention_dropouts: list[list[int]] = []
        self.attention, self.is_usual, self.device = PROBE_ATTENTION, False, "meta"
        self.names = {module: name for name, module in model.named_modules()}

    def run(self) -> None:
        quiet_dropouts(self.model)
        handles = []
        inner = f"{self.path}." if self.path else "no layers"
        for name, module in self.model.named_modules():
            if name.startswith(inner):
                index = name.removeprefix(inner)
                if index.isdigit():
                    handles.append(module.register_forward_pre_hook(self._before_layer, with_kwargs=True))
                    handles.append(module.register_forward_hook(self._after_layer(int(index)), with_kwargs=True))
                elif is_linear(module) and _is_plain(self.model.get_submodule(name.rpartition(".")[0])):
                    handles.append(module.register_forward_hook(self._watch_output(name)))
            elif isinstance(module, _QuietDropout) or (
                any(True for _ in module.parameters(recurse=False))
                and not any(f"{name}.".startswith(f"{table}.") for table in self.tables)
            ):
                handles.append(module.register_forward_hook(self._after_other(name)))
        try:
            self._forward()
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self) -> None:
        register_shapes_only_attention(self._record_attention)
        own = str(self.model.config._attn_implementation)  # type: ignore[union-attr]
        attempts = [(PROBE_ATTENTION, False, "meta"), (own, True, "meta"), ("eager", True, "meta")]
        if sum(parameter.numel() for parameter in self.model.parameters()) < MAX_NUMEL:
            attempts += [(PROBE_ATTENTION, False, "cpu"), (own, False, "cpu")]
        error = None
        # Masks of an unknown attention are left out. Where code needs masks, or reads what it has computed, it finds
        # usual values, and at last there are some.
        for self.attention, self.is_usual, self.device in attempts:
            if self.device == "cpu":
                give_values(self.model)
            try:
                self._attempt()
                return
            except Exception as raised:  # whatever a model's code raises without values
                error = raised
        raise ValueError(f"{type(self.model).__name__} cannot run without values ({error})") from error

    def _attempt(self) -> None:
        self.layer_calls, self.before, self.after, self.added_sizes = [], [], [], {}
        self.recorder, self.carried, self.given = RecordDropoutCalls(), set(), []
        self.dropouts = [[] for _ in range(self.num_layers + 1)]
        self.attention_calls = [{} for _ in range(self.num_layers)]
        self.attention_dropouts = [[] for _ in range(self.num_layers)]
        self.cuts = RecordCuts()
        with torch.enable_grad(), self.recorder, self.cuts, self._chosen():
            self.model.forward_as_written(input_ids=self._tokens(), use_cache=False)  # type: ignore[operator]
        self.dropouts[-1] += self.recorder.calls

    def _tokens(self) -> Tensor:
        return torch.ones(PROBE_ROWS, PROBE_TOKENS, dtype=torch.int64, device=self.device)

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        experts = "batched_mm" if self.device == "meta" else "eager"  # one operator, or no copies of weights
        with (
            implementations(self.model.config, attention=self.attention, experts=experts),
            UsualValues() if self.is_usual else nullcontext(),
        ):
            yield

    @property
    def problem(self) -> str:
        layer = self.model.get_submodule(self.path)[0] if self.carried else None  # type: ignore[index]
        arguments = list(inspect.signature(layer.forward).parameters) if layer is not None else []
        names = [arguments[int(key.split()[1])] if key.startswith("argument ") else key for key in sorted(self.carried)]
        return f"they read {' and '.join(names)} beside the hidden states" if names else ""

    def around(self, names: list[str]) -> tuple[str, ...]:
        """Modules around the layers, without those that contain the layers."""
        return tuple(name for name in names if not f"{self.path}.".startswith(f"{name}."))

    def counts_from_zero(self) -> bool:
        """Whether the positions that a class counts itself are 0, 1, 2 and so on.

        Shown by what it looks up, and what it calls the first layer with, without positions and with these."""
        give_values(self.model)
        positions = torch.arange(PROBE_TOKENS).expand(PROBE_ROWS, -1)
        try:
            counted, given = self._indices({}), self._indices({"position_ids": positions})
        except Exception:  # whatever a model's code raises
            return True
        passed_on = [found for found in given if found not in counted]
        is_same = len(given) - len(passed_on) == len(counted)
        return is_same and all(found[1] == positions.tolist() for found in passed_on)

    def _indices(self, inputs: Mapping[str, Tensor]) -> list[Any]:
        """The whole numbers that modules are called with until the first layer."""
        found: list[Any] = []
        names = {module: name for name, module in self.model.named_modules()}

        def record(module: nn.Module, args: Any, kwargs: Any) -> None:
            for value in (*args, *(kwargs[key] for key in sorted(kwargs))):
                if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 2:
                    found.append((names[module], value.expand(PROBE_ROWS, -1).tolist()))
            if names[module].startswith(f"{self.path}."):
                raise PartReached

        handles = [
            module.register_forward_pre_hook(record, with_kwargs=True)
            for module, name in names.items()
            if not any(True for _ in module.children()) or name.startswith(f"{self.path}.")
        ]
        tokens = torch.arange(3, 3 + PROBE_TOKENS).expand(PROBE_ROWS, -1)
        try:
            with torch.no_grad(), implementations(self.model.config, attention=PROBE_ATTENTION):
                self.model.forward_as_written(input_ids=tokens, use_cache=False, **inputs)  # type: ignore[operator]
        except PartReached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return found

    def try_parts(self, stack: LayerStack, other_lists: list[str]) -> LayerStack:
        """Try the parts of the forward, given embeddings, or tokens where the class requires them."""
        calls_others = [name for name in stack.after if any(name.startswith(f"{other}.") for other in other_lists)]
        problem, failure = stack.problem or (f"it calls {calls_others[0]} after them" if calls_others else ""), ""
        for needs_tokens in (False, True):
            tried = replace(stack, needs_tokens=needs_tokens, problem=problem)
            try:
                for is_training in (True, False):
                    self._run_parts(tried, is_training=is_training)
                return tried
            except Exception as error:  # whatever a model's code raises where its layers are stubs
                failure = failure or f"its forward reads more of them than their output ({error})"
        return replace(stack, problem=problem or failure)

    def _run_parts(self, stack: LayerStack, *, is_training: bool) -> None:
        zeros = torch.zeros(PROBE_ROWS, PROBE_TOKENS, stack.embedding_size, device=self.device)
        self.model.train(is_training)
        try:
            with torch.no_grad(), self._chosen():
                calls = stack.contexts(self.model, zeros)
                stack.head(self.model, stack.embed(self.model, input_ids=self._tokens()))
        finally:
            self.model.train()
        for call, expected in zip(calls, self.given, strict=True):
            found = {key: _shape(value) for key, value in call.named().items() if value is not None}
            missing = [name for name, shape in expected.items() if name not in found or found[name] != shape]
            if missing:
                raise ValueError(f"a layer is not given its {missing[0]}")

    def _record_attention(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        layer, name = len(self.layer_calls), self.names[module]
        if not self.num_layers:
            return
        layer = min(layer, self.num_layers - 1)  # what attends after the layers counts as a second call of the last
        self.attention_calls[layer][name] = dict(options)
        if options.get("dropout"):
            self.attention_dropouts[layer].append(len(self.recorder.calls) - 1)

    def _watch_output(self, name: str) -> Callable[..., None]:
        return lambda _module, _args, output: self.cuts.track(name, output)

    def _before_layer(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Note what the layer is given, and give it inputs of its own for what else carries a gradient."""
        self.dropouts[-1] += self.recorder.calls
        self.recorder.calls = []
        if not self.layer_calls:
            self.dropouts_before = len(self.dropouts[-1])
        _, call = split_hidden(args, kwargs)
        self.given.append({key: _shape(value) for key, value in call.named().items() if value is not None})
        self.leaves = {}
        if not call.by_keyword:
            others = [self._isolate(f"argument {index + 1}", value) for index, value in enumerate(call.args)]
            args = (args[0], *others)
        return args, {
            key: value if key == HIDDEN and call.by_keyword else self._isolate(key, value)
            for key, value in kwargs.items()
        }

    def _isolate(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):  # layers may write into it
            value.update({name: self._isolate(key, item) for name, item in value.items()})
        elif isinstance(value, tuple | list):
            return type(value)(self._isolate(key, item) for item in value)
        elif isinstance(value, Tensor) and value.requires_grad:
            self.leaves.setdefault(key, []).append(value.detach().requires_grad_())
            return self.leaves[key][-1]
        return value

    def _depends_on(self, leaves: list[Tensor], output: Any) -> bool:
        """Whether a layer hands on what it was given beside the hidden states. If it only keeps it, nothing is lost."""
        outputs = output if isinstance(output, tuple | list) else (output,)
        sums = [x.sum() for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        return bool(sums) and any(
            grad is not None for grad in torch.autograd.grad(sums, leaves, retain_graph=True, allow_unused=True)
        )

    def _after_layer(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.layer_calls.append(index)
            self.carried |= {key for key, leaves in self.leaves.items() if self._depends_on(leaves, output)}
            self.dropouts[index], self.recorder.calls = self.recorder.calls, []
            self.output_type = next((kind for kind in (tuple, list) if isinstance(output, kind)), Tensor)
            self.output_length = 1 if self.output_type is Tensor else len(output)
            self.hidden_shape = tuple(first_output(output).shape[2:])

        return hook

    def _after_other(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            part = self.after if self.layer_calls else self.before
            part.append(name)
            first = first_output(output)
            if part is self.after or not isinstance(first, Tensor):
                return
            if not (args and isinstance(args[0], Tensor) and args[0].shape == first.shape):
                self.added_sizes[name] = int(first.shape[-1])

        return hook


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def prepare_tables(model: nn.Module) -> None:
    """Let what a probed model does around its layers run on the CPU, where it reads no trained parameter."""
    materialize_buffers(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and not parameter.requires_grad:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]:
            delattr(module, name)  # frequencies of long sequences, which the probe's forward left on the meta device


def give_values(model: nn.Module) -> None:
    """Give a model on the meta device equal weights, of which each tensor stores one number."""
    materialize_buffers(model)
    given: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = torch.full((), 0.01, dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = given.setdefault(parameter, nn.Parameter(value))


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
