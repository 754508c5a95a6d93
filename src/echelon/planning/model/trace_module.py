"""The `ModelShape` of any `nn.Module`: one forward on the meta device counts its GEMMs and saved tensors.

[Note: sections]

A module is split into sections, and each becomes a layer:

    a module with `pipeline_model()`   its pipeline layers
    any other                          the items of its longest list of modules of one class, outermost first, and what
                                       comes before and after them
    one without such a list            the module itself

The token embedding and the GEMM of the logits are the two ends of a `ModelShape`, not layers. A section with nothing
else (an embedding, a norm and a head) is not a layer either; its other parameters are the model's.

A token is an element of the first integer input [rows, length], else a vector of the first input [rows, length, size],
else a row. Saved elements are those of the traced sequence length.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from echelon.layout.validation_error import ValidationError
from echelon.models import user_model
from echelon.models.pipeline_model import get_pipeline_model, is_within
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.tp.tensor_parallel import match_roles
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, UNSPLIT, ModelShape
from echelon.planning.model.traced_shape import ModuleCounts, Section, build_shape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from echelon.planning.model.op_counter import OpCounter

TRACED_SEQUENCES = 2
"""sequences of a traced batch; one could be mistaken for a broadcast dimension"""
BEFORE, AFTER = "before the layers", "after the layers"


def trace_module(model: str | nn.Module, inputs: Mapping[str, Tensor] | None = None, *, name: str = "") -> ModelShape:
    """Trace a module with inputs of its forward, or `file.py:factory` with those of `batch(rows, step)` in the file.

    The module and its inputs are not changed. Raises ValidationError if the module cannot be built or run on meta.
    """
    if isinstance(model, str):
        name = name or model
        model, inputs = _load_model(model)
    name = name or type(model).__name__
    if inputs is None:
        hint = "give `inputs`, the keyword arguments of its forward"
        raise ValidationError.single("model", name, "is traced without inputs", hint=hint)
    if not isinstance(inputs, Mapping):
        rule = f"has a batch that is not keyword arguments ({type(inputs).__name__})"
        hint = "let batch(rows, step) return a dictionary of the forward's arguments"
        raise ValidationError.single("model", name, rule, hint=hint)
    module = meta_copy(model)
    given = {key: value.to("meta") if hasattr(value, "to") else value for key, value in inputs.items()}
    sections = _find_sections(module)
    weights = dict(module.named_parameters())
    counter = _make_counter(module, weights)
    try:
        width = _run_sections(module, given, sections, counter)
    except Exception as error:
        rule = f"cannot be run on the meta device ({_first_line(error)})"
        hint = "tracing runs the forward pass without values: shapes must not depend on values"
        raise ValidationError.single("model", name, rule, hint=hint) from error
    tokens, seq_len = _count_tokens(inputs)
    counts = ModuleCounts(
        sections=sections,
        by_section=counter.sections,
        weights={key: tuple(weight.shape) for key, weight in weights.items()},
        owners=_param_sections(module, weights, sections),
        splits=counter.splits,
        tokens=tokens,
        seq_len=seq_len,
        width=width // tokens,
        supports_tp=_supports_tp(module),
        supports_cp=_supports_cp(module),
        supports_pp=hasattr(module, "pipeline_model"),
    )
    return build_shape(name, counts)


def _load_model(spec: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    import torch

    try:
        factory, batch = user_model.load_factory(spec), user_model.load_factory(spec.rpartition(":")[0] + ":batch")
        inputs = batch(TRACED_SEQUENCES, 0)
        try:
            with torch.device("meta"):
                return factory(), inputs
        except (NotImplementedError, RuntimeError):  # its constructor reads values of tensors
            return factory(), inputs
    except Exception as error:
        raise ValidationError.single("model", spec, f"cannot be built ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy in training mode on the meta device. Shared tensors stay shared."""
    import torch
    from torch import Tensor, nn

    memo: dict[int, Any] = {}
    for module in model.modules():
        registered = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in (*registered, *(value for value in vars(module).values() if isinstance(value, Tensor))):
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo).train()


def _count_tokens(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """(tokens of a batch, tokens of a sequence)"""
    import torch

    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()]
    integers = [t for t in tensors if t.dim() == 2 and not t.dtype.is_floating_point and t.dtype != torch.bool]
    vectors = [t for t in tensors[:1] if t.dim() == 3 and t.dtype.is_floating_point]
    for tensor in (*integers, *vectors):
        return tensor.shape[0] * tensor.shape[1], tensor.shape[1]
    return (tensors[0].shape[0] if tensors else 1), 1


def _supports_tp(module: nn.Module) -> bool:
    """Whether a table says how tensor parallelism splits the module."""
    try:
        return bool(match_roles(module, get_tp_split(module)))
    except ValueError:
        return False


def _supports_cp(module: nn.Module) -> bool:
    """Whether the module has a `CoreAttention` and takes `positions`, as context parallelism requires."""
    from echelon.models.attention import CoreAttention

    parameters = inspect.signature(module.forward).parameters.values()
    takes_positions = any(p.name == "positions" or p.kind is p.VAR_KEYWORD for p in parameters)
    return takes_positions and any(isinstance(child, CoreAttention) for child in module.modules())


def _find_sections(module: nn.Module) -> list[Section]:
    if hasattr(module, "pipeline_model"):
        layers = [(layer.name, layer.modules) for layer in get_pipeline_model(module).layers]
        return [Section(name, _class_name(module, modules) or name, modules) for name, modules in layers]
    names = _longest_module_list(module)
    if not names:
        return [Section("", type(module).__name__, ("",), always_layer=True)]
    items = [Section(name, _class_name(module, (name,)), (name,), always_layer=True) for name in names]
    return [Section(BEFORE, "before", ()), *items, Section(AFTER, "after", ())]


def _class_name(module: nn.Module, names: tuple[str, ...]) -> str:
    modules = dict(module.named_modules(remove_duplicate=False))
    return type(modules[names[0]]).__name__ if len(names) == 1 and names[0] in modules else ""


def _longest_module_list(module: nn.Module) -> list[str]:
    """Names of the items of the longest list of one class; nested lists are parts of layers."""
    from torch import nn

    lists: dict[str, list[str]] = {}
    for name, items in module.named_modules():
        if any(is_within(name, outer) for outer in lists) or not isinstance(items, nn.ModuleList | nn.Sequential):
            continue
        one_class = len({type(item) for item in items}) == 1 and len(items) > 1
        if one_class and any(True for _ in items.parameters()):
            lists[name] = [f"{name}.{index}" if name else str(index) for index in range(len(items))]
    return max(lists.values(), key=len, default=[])


def _param_sections(module: nn.Module, weights: Mapping[str, Tensor], sections: list[Section]) -> dict[str, str]:
    """The first section of each parameter. A tied parameter has its first name."""
    first = {id(weight): name for name, weight in weights.items()}
    owners: dict[str, str] = {}
    for section in sections:
        for name, weight in module.named_parameters(remove_duplicate=False):
            if any(not owner or is_within(name, owner) for owner in section.modules):
                owners.setdefault(first[id(weight)], section.name)
    return owners


def _run_sections(module: nn.Module, inputs: dict[str, Any], sections: list[Section], counter: OpCounter) -> int:
    """Run the module section by section, and return the most elements passed between sections."""
    passed = [0]

    def enter(name: str, hidden: Any) -> None:
        passed.append(_num_elements(hidden if isinstance(hidden, tuple | list) else (hidden,)))
        counter.enter_section(name, hidden)

    with counter.counting():
        counter.enter_section(sections[0].name, tuple(inputs.values()))
        if hasattr(module, "pipeline_model"):
            pipeline_model = get_pipeline_model(module)
            counter.enter_section("shared by the layers")
            shared, hidden = pipeline_model.shared(**inputs), None
            for layer in pipeline_model.layers:
                enter(layer.name, hidden)
                hidden = layer.run(hidden, shared, **inputs)
            return max(passed)
        for section in sections:
            if section.always_layer and section.name:
                item = module.get_submodule(section.name)
                item.register_forward_pre_hook(lambda _, args, name=section.name: enter(name, args[:1]))
                item.register_forward_hook(lambda *_: enter(AFTER, _[-1]))
        module(**inputs)
    return max(passed) or _num_elements(inputs.values())


def _num_elements(values: Iterable[Any]) -> int:
    return sum(value.numel() for value in values if hasattr(value, "numel") and value.dtype.is_floating_point)


def _make_counter(module: nn.Module, weights: Mapping[str, Tensor]) -> OpCounter:
    from echelon.planning.model.op_counter import OpCounter

    try:
        roles = match_roles(module, get_tp_split(module))
    except ValueError:  # a module without a table is not split
        roles = {}
    divided = {"column": COLUMN_PARALLEL, "row": ROW_PARALLEL}
    splits = {name: divided.get(roles.get(name.rpartition(".")[0], "").partition("/")[0], UNSPLIT) for name in weights}
    return OpCounter(weights, splits)
