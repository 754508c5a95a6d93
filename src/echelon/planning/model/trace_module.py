"""Any `nn.Module` as a `ModelShape`: run once on the meta device, its products and saved tensors counted, not guessed.

[Note: sections]

A module is cut into sections, and what each does becomes a layer:

    a module with `pipeline_model()`       the links of its chain
    any other                     the items of its longest list of modules of one class, outermost first; what comes
                                  before them and after them
    one without such a list       the whole of it

The embedding of tokens and the product that gives logits are no layers of a `ModelShape` but its two ends. A section
that is nothing else (an embedding, a norm and a head) is not a layer either; its other parameters are the model's.

A token is an element of the first whole-number input [rows, length], else one of the vectors of a first input [rows,
length, size], else a row. Saved elements are those of the length that was traced.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from echelon.layout.validation_error import ValidationError, ValidationIssue
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
"""sequences of a user's batch; one could be taken for a dimension that is not there"""
BEFORE, AFTER = "before the layers", "after the layers"


def trace_module(model: str | nn.Module, inputs: Mapping[str, Tensor] | None = None, *, name: str = "") -> ModelShape:
    """The shape of a module, given with inputs of its forward, or of `file.py:factory`.

    The file has a function `batch(rows, step)` too, which gives the inputs. A module and its inputs stay as they are.
    Raises FaultError where the module cannot be built, or not be run without values.
    """
    if isinstance(model, str):
        name = name or model
        model, inputs = _load_model(model)
    name = name or type(model).__name__
    if inputs is None:
        rule, hint = "is traced without inputs", "give `inputs`, the keyword arguments of its forward"
        raise ValidationError([ValidationIssue(key="model", value=name, message=rule, hint=hint)])
    if not isinstance(inputs, Mapping):
        rule = f"has a batch that is not keyword arguments ({type(inputs).__name__})"
        hint = "let batch(rows, step) return a dictionary of the forward's arguments"
        raise ValidationError([ValidationIssue(key="model", value=name, message=rule, hint=hint)])
    module, given = meta_copy(model), {key: _to_meta(value) for key, value in inputs.items()}
    sections = _find_sections(module)
    weights = dict(module.named_parameters())
    counter = _make_counter(module, weights)
    try:
        width = _run_sections(module, given, sections, counter)
    except Exception as error:
        rule = f"cannot be run on the meta device ({_first_line(error)})"
        hint = "tracing runs the forward pass without values: what decides shapes by values cannot be traced"
        raise ValidationError([ValidationIssue(key="model", value=name, message=rule, hint=hint)]) from error
    tokens, seq_len = _count_tokens(inputs)
    owners = _param_sections(module, weights, sections)
    counts = ModuleCounts(
        sections=sections,
        tallies=counter.sections,
        weights={key: tuple(weight.shape) for key, weight in weights.items()},
        owners=owners,
        splits=counter.splits,
        tokens=tokens,
        seq_len=seq_len,
        width=width // tokens,
        supports_cp=_supports_cp(module),
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
        except (NotImplementedError, RuntimeError):  # it reads values of tensors while it is built
            return factory(), inputs
    except Exception as error:
        rule = f"cannot be built ({_first_line(error)})"
        raise ValidationError([ValidationIssue(key="model", value=spec, message=rule)]) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy in training mode, whose tensors have shapes only. What is shared in the model is shared in the copy."""
    import torch
    from torch import Tensor, nn

    memo: dict[int, Any] = {}
    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in (*held, *(value for value in vars(module).values() if isinstance(value, Tensor))):
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo).train()


def _to_meta(value: Any) -> Any:
    return value.to("meta") if hasattr(value, "to") else value


def _count_tokens(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """How many tokens a batch has, and how many of them are a sequence."""
    import torch

    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()]
    whole = [t for t in tensors if t.dim() == 2 and not t.dtype.is_floating_point and t.dtype != torch.bool]
    wide = [t for t in tensors[:1] if t.dim() == 3 and t.dtype.is_floating_point]
    if found := (whole or wide):
        return found[0].shape[0] * found[0].shape[1], found[0].shape[1]
    return (tensors[0].shape[0] if tensors else 1), 1


def _supports_cp(module: nn.Module) -> bool:
    """As context parallelism asks for it (parallel/cp/context_parallel.py): attention that it knows, and positions from outside."""
    from echelon.models.attention import CoreAttention

    takes = inspect.signature(module.forward).parameters.values()
    given = any(p.name == "positions" or p.kind is p.VAR_KEYWORD for p in takes)
    return given and any(isinstance(found, CoreAttention) for found in module.modules())


# -- sections ---------------------------------------------------------------------------------------------------------


def _find_sections(module: nn.Module) -> list[Section]:
    if hasattr(module, "pipeline_model"):
        links = get_pipeline_model(module).layers
        return [
            Section(name=link.name, class_name=_class_name(module, link.modules) or link.name, modules=link.modules)
            for link in links
        ]
    found = _longest_module_list(module)
    if not found:
        return [Section(name="", class_name=type(module).__name__, modules=("",), always_layer=True)]
    items = [
        Section(name=name, class_name=_class_name(module, (name,)), modules=(name,), always_layer=True)
        for name in found
    ]
    return [
        Section(name=BEFORE, class_name="before", modules=()),
        *items,
        Section(name=AFTER, class_name="after", modules=()),
    ]


def _class_name(module: nn.Module, names: tuple[str, ...]) -> str:
    modules = dict(module.named_modules(remove_duplicate=False))
    return type(modules[names[0]]).__name__ if len(names) == 1 and names[0] in modules else ""


def _longest_module_list(module: nn.Module) -> list[str]:
    """The names of the items of the longest list of one class; lists inside such lists are parts of layers."""
    from torch import nn

    lists: dict[str, list[str]] = {}
    for name, found in module.named_modules():
        if any(is_within(name, outer) for outer in lists) or not isinstance(found, nn.ModuleList | nn.Sequential):
            continue
        one_class = len({type(item) for item in found}) == 1 and len(found) > 1
        if one_class and any(True for _ in found.parameters()):
            lists[name] = [f"{name}.{index}" if name else str(index) for index in range(len(found))]
    return max(lists.values(), key=len, default=[])


def _param_sections(module: nn.Module, weights: Mapping[str, Tensor], sections: list[Section]) -> dict[str, str]:
    """The section of each parameter: the first that has it. A parameter of several names goes by its first."""
    first = {id(weight): name for name, weight in weights.items()}
    found: dict[str, str] = {}
    for section in sections:
        for name, weight in module.named_parameters(remove_duplicate=False):
            if any(not owner or is_within(name, owner) for owner in section.modules):
                found.setdefault(first[id(weight)], section.name)
    return found


def _run_sections(module: nn.Module, inputs: dict[str, Any], sections: list[Section], counter: OpCounter) -> int:
    """Runs the module, section by section; gives the most elements that one hands to the next."""
    handed = [0]

    def enter(name: str, carried: Any) -> None:
        handed.append(_num_elements(carried if isinstance(carried, tuple | list) else (carried,)))
        counter.enter_section(name, carried)

    with counter.counting():
        counter.enter_section(sections[0].name, tuple(inputs.values()))
        if hasattr(module, "pipeline_model"):
            chain = get_pipeline_model(module)
            counter.enter_section("shared by the links")
            shared, carried = chain.shared(**inputs), None
            for link in chain.layers:
                enter(link.name, carried)
                carried = link.run(carried, shared, **inputs)
            return max(handed)
        for section in sections:
            if section.always_layer and section.name:
                item = module.get_submodule(section.name)
                item.register_forward_pre_hook(lambda _, args, name=section.name: enter(name, args[:1]))
                item.register_forward_hook(lambda *_: enter(AFTER, _[-1]))
        module(**inputs)
    return max(handed) or _num_elements(inputs.values())


def _num_elements(values: Iterable[Any]) -> int:
    return sum(value.numel() for value in values if hasattr(value, "numel") and value.dtype.is_floating_point)


def _make_counter(module: nn.Module, weights: Mapping[str, Tensor]) -> OpCounter:
    from echelon.planning.model.op_counter import OpCounter

    try:
        words = match_roles(module, get_tp_split(module))
    except ValueError:  # a module without a table is not divided
        words = {}
    divided = {"column": COLUMN_PARALLEL, "row": ROW_PARALLEL}
    splits = {name: divided.get(words.get(name.rpartition(".")[0], "").partition("/")[0], UNSPLIT) for name in weights}
    return OpCounter(weights, splits)
