"""Finds the regions of a foreign model's layers that tensor parallelism can split, and proves each plan.

[Note: how a region is found]

1. A layer runs once, in float64 with random weights and a few tokens. Each child that has two linears or more and no
   matrices beside them is a candidate; so are the linears that the layer calls itself.
2. The last linear that a candidate calls is its row. Linears that feed no other linear but the row are its columns:
   gate and up; q, k and v; the second projections of latent attention. What feeds them stays whole inside.
3. Code that counts heads or sizes reads them from its own attributes or from the config: these are divided too, first
   none, then heads, then sizes, then the config's.
4. Each plan is tried (region_trial.py), and the first that is exact is taken. A candidate without one stays whole:
   every rank computes all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.foreign_experts import ForeignExperts
from echelon.models.foreign.layer_probe import implementations
from echelon.models.foreign.layer_stack import LayerCall, first_output
from echelon.models.foreign.unfuse import is_linear, output_dim
from echelon.models.lora.adapter import remove_adapters
from echelon.parallel.tp.region_plan import RegionPlan
from echelon.parallel.tp.region_trial import RegionCall, is_exact, run_whole

ROWS, TOKENS = 2, 5
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
"""names under which configs have the number of key heads"""
HEAD_KEYS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class DerivedSplit:
    """What tensor parallelism splits of a foreign model's layers."""

    regions: tuple[RegionPlan, ...]
    whole: tuple[str, ...]
    """children of layers with matrices that every rank computes"""
    expert_layers: tuple[str, ...] = ()
    """those with experts, which compute token by token"""
    outside: tuple[str, ...] = ()
    """parameters of regions and whole modules that these hand out for code after them, such as a bias"""


@dataclass(frozen=True)
class _Heads:
    """Numbers of heads of a config, on one device and on one of `tp` ranks."""

    queries: int
    keys: int
    tp: int

    @property
    def local_queries(self) -> int:
        return self.queries // self.tp

    @property
    def local_keys(self) -> int:
        return max(self.keys // self.tp, 1)

    def divides(self) -> bool:
        return self.queries % self.tp == 0 and (self.keys % self.tp == 0 or self.tp % self.keys == 0)

    def local(self, name: str, value: int) -> int | None:
        """What an attribute becomes on a rank, if it is a number of heads."""
        if "head" not in name and "group" not in name:
            return None
        if name == "num_key_value_groups":
            return self.local_queries // self.local_keys
        if value == self.keys and ("kv" in name or "key" in name):
            return self.local_keys
        return self.local_queries if value == self.queries else self.local_keys if value == self.keys else None


def head_counts(model: ForeignCausalLM) -> tuple[int, int]:
    """The heads of queries and of keys that the config states; 0 where it states none."""
    config: Any = model.config
    queries = int(getattr(config, "num_attention_heads", 0) or 0)
    return queries, next((int(n) for key in KEY_HEADS if (n := getattr(config, key, None))), queries)


def derive_split(model: ForeignCausalLM, tp: int) -> DerivedSplit:
    """Find what `tp` ranks can split. Every rank finds the same: the weights of a trial are those of a fixed seed."""
    heads = _Heads(*head_counts(model), tp)
    if not model.layer_stack.num_layers:
        return DerivedSplit(regions=(), whole=())
    try:
        calls = _layer_calls(model)
    except Exception:  # whatever a model's code raises where its layers are stubs: all ranks compute all layers
        if not model.layer_stack.problem:
            raise
        return DerivedSplit(regions=(), whole=())
    with implementations(model.config, experts="eager"):  # the others have no float64
        return _derive(model, calls, heads)


def _derive(model: ForeignCausalLM, calls: list[LayerCall], heads: _Heads) -> DerivedSplit:
    found: dict[str, tuple[list[RegionPlan], list[str], list[str]]] = {}
    regions: list[RegionPlan] = []
    whole: list[str] = []
    outside: list[str] = []
    stack = model.layer_stack
    for name, call in zip(stack.layer_names, calls, strict=True):
        layer = model.get_submodule(name)
        kind = layer_signature(layer, call)
        if kind not in found:
            try:
                found[kind] = _split_layer(layer, call, heads, stack.carried)
            except Exception:  # whatever a layer raises that does not run alone: every rank computes all of it
                if not stack.problem:
                    raise
                found[kind] = ([], [], [])
        plans, others, handed_out = found[kind]
        regions += [plan.at(f"{name}.{plan.module}".rstrip(".")) for plan in plans]
        whole += [f"{name}.{other}" for other in others]
        outside += [f"{name}.{other}" for other in handed_out]
    moe = [
        name for name in whole if any(isinstance(part, ForeignExperts) for part in model.get_submodule(name).modules())
    ]
    return DerivedSplit(
        regions=tuple(regions),
        whole=tuple(name for name in whole if name not in moe),
        expert_layers=tuple(moe),
        outside=tuple(outside),
    )


def _layer_calls(model: ForeignCausalLM) -> list[LayerCall]:
    stack = model.layer_stack
    like = torch.zeros(ROWS, TOKENS, stack.embedding_size, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), float64_casts(torch.float64), _values_between(model):
            return stack.contexts(model, like)
    finally:
        model.train(was_training)


@contextmanager
def _values_between(model: ForeignCausalLM) -> Iterator[None]:
    """Give parameters on the meta device values that belong to no module around the layers, for a while."""
    stack, owners = model.layer_stack, []
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(f"{name}.") for name in (stack.path, *stack.before, *stack.after))
        owners += [] if inside else [(module, name, p) for name, p in module.named_parameters(recurse=False)]
    for module, name, p in owners:
        module._parameters[name] = nn.Parameter(torch.zeros(p.shape, dtype=torch.float64), requires_grad=False)
    try:
        yield
    finally:
        for module, name, p in owners:
            module._parameters[name] = p


def layer_signature(layer: nn.Module, call: LayerCall) -> str:
    """Return the same for layers that run the same code with tensors of the same shapes."""
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    classes = [(name, type(module).__name__) for name, module in layer.named_modules()]
    plain = [
        (key, value)
        for module in layer.modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str) and key != "layer_idx"
    ]
    return repr((shapes, classes, plain, sorted(call.kwargs)))


def _split_layer(
    layer: nn.Module, call: LayerCall, heads: _Heads, carried: tuple[str, ...]
) -> tuple[list[RegionPlan], list[str], list[str]]:
    """The plans of one layer, its children that stay whole, and parameters that they hand out.

    Names are relative to the layer.
    """
    local = random_copy(layer)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(call.shape, dtype=torch.float64, generator=generator).requires_grad_()
    call = _with_values(call, carried, generator)
    entered: dict[str, RegionCall] = {}
    children = dict(_called_children(local))
    handles = [
        child.register_forward_pre_hook(_record_call(entered, name), with_kwargs=True)
        for name, child in children.items()
    ]
    with torch.enable_grad(), float64_casts(torch.float64):
        call.run(local, hidden)
    for handle in handles:
        handle.remove()
    plans: list[RegionPlan] = []
    whole: list[str] = []
    outside: list[str] = []
    for name, child in children.items():
        if name not in entered or is_linear(child) or not any(p.dim() > 1 for p in child.parameters()):
            continue
        handed_out = _handed_out(child, entered[name])
        outside += [f"{name}.{other}" for other in handed_out]
        plan = _first_exact(child, entered[name], heads, handed_out) if _has_only_linears(child) else None
        if plan is None:
            whole.append(name)
        else:
            plans.append(plan.at(name))
    own = [name for name, child in children.items() if is_linear(child)]
    if own:
        args = (hidden, *call.args) if not call.by_keyword else ()
        kwargs = dict(call.kwargs) if args else {**call.kwargs, "hidden_states": hidden}
        plan = _first_exact(local, RegionCall(args, kwargs), heads, own=own)
        if plan is not None:
            plans.append(plan)
    return plans, whole, outside


def _called_children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children that a layer calls: those of its lists, in place of the lists."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward:
            yield from _called_children(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def _handed_out(module: nn.Module, call: RegionCall) -> tuple[str, ...]:
    """Parameters that other code applies to tokens: the first of a module's outputs does not depend on them.

    Outputs for each token are sliced as the first is."""
    with torch.enable_grad(), float64_casts(torch.float64):
        output = module(*call.args, **call.kwargs)
    first, tokens = first_output(output), call.hidden.shape[:2]
    others = [
        other
        for other in (output[1:] if isinstance(output, tuple | list) else ())
        if isinstance(other, Tensor) and other.shape[:2] != tokens
    ]
    return tuple(
        name
        for name, p in module.named_parameters()
        if any(_depends(other, p) for other in others) and not _depends(first, p)
    )


def _with_values(call: LayerCall, carried: tuple[str, ...], generator: torch.Generator) -> LayerCall:
    """The call with random values for what the loss has a gradient with respect to, instead of zeros."""

    def renew(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(renew, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, dtype=value.dtype, generator=generator).requires_grad_()

    args = tuple(renew(x) if f"argument {index + 1}" in carried else x for index, x in enumerate(call.args))
    kwargs = {key: renew(value) if key in carried else value for key, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs)


def _record_call(entered: dict[str, RegionCall], name: str) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        entered[name] = RegionCall(args, kwargs)

    return hook


def random_copy(layer: nn.Module) -> nn.Module:
    """A copy with random float64 weights, whatever device the layer is on. Vectors are near one, as norms are."""
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    for p in layer.parameters():
        values = torch.randn(p.shape, dtype=torch.float64, generator=generator)
        memo[id(p)] = nn.Parameter(values / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.3 * values)
    copied = remove_adapters(copy.deepcopy(layer, memo))
    for module in copied.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to("cpu", torch.float64))
    return copied.eval()


def _has_only_linears(module: nn.Module) -> bool:
    others = [child for child in module.modules() if not is_linear(child)]
    return not any(p.dim() > 1 for child in others for p in child.parameters(recurse=False))


def _first_exact(
    module: nn.Module,
    call: RegionCall,
    heads: _Heads,
    outside: tuple[str, ...] = (),
    *,
    own: list[str] | None = None,
) -> RegionPlan | None:
    """The first plan that is exact; of the module's own linears only, where `own` names them."""
    with torch.enable_grad(), float64_casts(torch.float64):
        columns, row = _columns_and_row(module, call, own)
        if not columns:
            return None
        whole = run_whole(module, call)
        for plan in _plans(module, columns, row, heads, enters_at_columns=own is not None):
            plan = replace(plan, outside=outside)
            if is_exact(module, call, whole, plan, heads.tp):
                return plan
    return None


def _columns_and_row(module: nn.Module, call: RegionCall, own: list[str] | None) -> tuple[list[str], str]:
    """Linears whose outputs no other linear reads but the last, and the last. See [Note: how a region is found]."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            inputs[name], outputs[name] = args[0], output

        return hook

    names = [name for name, child in module.named_modules() if is_linear(child) and (own is None or name in own)]
    handles = [module.get_submodule(name).register_forward_hook(record(name)) for name in names]
    call.separate()[0].run(module)
    for handle in handles:
        handle.remove()
    called = list(outputs)
    if len(called) < 2:
        return [], ""
    *before, row = called
    feeding = {name for name in before if any(_depends(inputs[other], outputs[name]) for other in before)}
    return [name for name in before if name not in feeding and _depends(inputs[row], outputs[name])], row


def _depends(value: Tensor, source: Tensor) -> bool:
    if not value.requires_grad or not source.requires_grad:
        return False
    (grad,) = torch.autograd.grad(value.sum(), source, retain_graph=True, allow_unused=True)
    return grad is not None


def _plans(
    module: nn.Module, columns: list[str], row: str, heads: _Heads, *, enters_at_columns: bool
) -> Iterator[RegionPlan]:
    """Plans to try, the simplest first."""
    sizes = {name: _outputs(module, name) for name in columns}
    plain = RegionPlan(
        module="", columns=dict.fromkeys(columns, heads.tp), row=row, enters_at_columns=enters_at_columns
    )
    if all(size % heads.tp == 0 for size in sizes.values()):
        yield plain
    if not heads.queries or not heads.divides():
        return
    head_dim = next((int(n) for m in module.modules() if isinstance(n := vars(m).get("head_dim"), int)), 0)
    key_size = heads.keys * head_dim
    parts = {name: min(heads.tp, heads.keys) if size == key_size else heads.tp for name, size in sizes.items()}
    of_heads = tuple(name for name, p in module.named_parameters() if p.shape == (heads.queries,))
    with_heads = replace(plain, columns=parts, head_params=of_heads, attributes=_local_heads(module, heads))
    yield with_heads
    with_sizes = replace(with_heads, attributes=_local_sizes(module, heads, head_dim, with_heads.attributes))
    yield with_sizes
    yield replace(with_sizes, config=dict(zip(HEAD_KEYS, (heads.local_queries, heads.local_keys), strict=True)))


def _outputs(module: nn.Module, name: str) -> int:
    linear: Any = module.get_submodule(name)
    return int(linear.weight.shape[output_dim(linear)])


def _local_heads(module: nn.Module, heads: _Heads) -> dict[str, dict[str, int]]:
    local: dict[str, dict[str, int]] = {}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if type(value) is int and key != "head_dim" and (now := heads.local(key, value)) is not None:
                local.setdefault(name, {})[key] = now
    return local


def _local_sizes(
    module: nn.Module, heads: _Heads, head_dim: int, local: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Divide sizes of all heads as well."""
    found = {name: dict(values) for name, values in local.items()}
    sizes = {
        heads.queries * head_dim: heads.local_queries * head_dim,
        heads.keys * head_dim: heads.local_keys * head_dim,
    }
    for name, child in module.named_modules():
        if is_linear(child):
            continue
        for key, value in vars(child).items():
            if type(value) is int and value in sizes and value > 1 and key not in found.get(name, {}):
                found.setdefault(name, {})[key] = sizes[value]
    return found
