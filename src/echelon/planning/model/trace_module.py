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

from collections.abc import Iterable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from echelon.compat import fake_tensor_mode
from echelon.layout.validation_error import ValidationError
from echelon.models import user_model
from echelon.models.forward_parts.shapes_only import ModuleCopy, copy_without_values, without_values
from echelon.models.pipeline_model import get_pipeline_model, has_pipeline_model, is_within
from echelon.planning.model.declared_support import TpDeclaration, read_support, solve_splits
from echelon.planning.model.model_shape import UNSPLIT, ModelShape
from echelon.planning.model.traced_shape import ModuleCounts, Section, build_shape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from echelon.planning.model.op_counter import OpCounter

TRACED_SEQUENCES = 2
"""sequences of a traced batch; one could be mistaken for a broadcast dimension"""
BEFORE, AFTER = "before the layers", "after the layers"


def trace_module(model: str | nn.Module, inputs: Mapping[str, Tensor] | None = None, *, name: str = "") -> ModelShape:
    """Trace a module with inputs of its forward, or `file.py:factory` with those of `batch(rows, step)` in the file.

    The module and its inputs are not changed. Raises ValidationError if the module cannot be built, or run without
    values: on the meta device, else with fake tensors, which also stand for what a module makes on a CPU.
    """
    if isinstance(model, str):
        name = name or model
        model, inputs = load_user_model(model)
    name = name or type(model).__name__
    if inputs is None:
        hint = "give `inputs`, the keyword arguments of its forward"
        raise ValidationError.single("model", name, "is traced without inputs", hint=hint)
    if not isinstance(inputs, Mapping):
        rule = f"has a batch that is not keyword arguments ({type(inputs).__name__})"
        hint = "let batch(rows, step) return a dictionary of the forward's arguments"
        raise ValidationError.single("model", name, rule, hint=hint)
    from echelon.planning.model.known_values import UnknownValueError

    solved = solve_splits(model, inputs)
    try:
        return trace_copy(copy_without_values(model), inputs, name, solved)
    except UnknownValueError as error:
        raise refuse_trace(name, error) from error
    except Exception:  # whatever a user's code raises, or torch where a module makes tensors on a CPU
        try:
            with fake_tensor_mode():
                return trace_copy(copy_without_values(model, "cpu"), inputs, name, solved)
        except Exception as error:
            raise refuse_trace(name, error) from error


def refuse_trace(name: str, error: Exception) -> ValidationError:
    """The refusal of a module that cannot be run without values."""
    from echelon.planning.model.known_values import UnknownValueError

    where = next(
        (frame for frame in reversed(extract_tb(error.__traceback__)) if not _is_internal(frame.filename)), None
    )
    place = f" at {Path(where.filename).name}:{where.lineno}" if where is not None else ""
    if isinstance(error, UnknownValueError):
        rule = f"cannot be planned: {error}{place}, and planning runs the forward pass without values"
        hint = "let shapes and branches depend on sizes and inputs alone"
        return ValidationError.single("model", name, rule, hint=hint)
    return ValidationError.single("model", name, f"cannot be run without values ({describe_error(error)}{place})")


def _is_internal(filename: str) -> bool:
    return any(part in filename for part in ("/torch/", "/echelon/planning/", "/echelon/models/foreign/"))


def describe_error(error: Exception) -> str:
    """An error of another library's or a user's code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


def trace_copy(
    module: ModuleCopy, inputs: Mapping[str, Any], name: str, solved: TpDeclaration | None = None
) -> ModelShape:
    """Trace a copy without values, which runs on its device. `solved`: how the solver splits a custom module."""
    import torch

    from echelon.planning.model.traced_dropout import replace_dropouts

    copied, given = module.module, dict(inputs)
    replace_dropouts(copied)
    sections = _find_sections(copied)
    weights = dict(copied.named_parameters())
    declared = read_support(copied, solved)
    counter = _make_counter(weights, declared.splits)
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            given[key] = without_values(value, module.device)
            counter.values.set(given[key], value)
    for tensor, value in module.buffers:
        counter.values.set(tensor, value)
    for path in declared.gathered:
        _watch_gathered(copied.get_submodule(path), counter)
    width = _run_sections(copied, given, sections, counter)
    tokens, seq_len = _count_tokens(inputs)
    counts = ModuleCounts(
        sections=sections,
        by_section=counter.sections,
        weights={key: tuple(weight.shape) for key, weight in weights.items()},
        owners=_param_sections(copied, weights, sections),
        splits=counter.splits,
        gathered=declared.gathered,
        tokens=tokens,
        seq_len=seq_len,
        width=width // tokens,
        support=declared.support,
        is_trainable=declared.is_trainable,
    )
    return build_shape(name, counts)


def load_user_model(spec: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Build `file.py:factory` without values if it can be, and the inputs that `batch` in its file makes."""
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
        raise ValidationError.single("model", spec, f"cannot be built ({describe_error(error)})") from error


def _count_tokens(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """(tokens of a batch, tokens of a sequence)"""
    import torch

    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()]
    integers = [t for t in tensors if t.dim() == 2 and not t.dtype.is_floating_point and t.dtype != torch.bool]
    vectors = [t for t in tensors[:1] if t.dim() == 3 and t.dtype.is_floating_point]
    for tensor in (*integers, *vectors):
        return tensor.shape[0] * tensor.shape[1], tensor.shape[1]
    return (tensors[0].shape[0] if tensors else 1), 1


def _find_sections(module: nn.Module) -> list[Section]:
    if has_pipeline_model(module):
        layers = [(layer.name, layer.modules) for layer in get_pipeline_model(module).layers]
        return [Section(name, _class_name(module, modules) or name, modules) for name, modules in layers]
    names = _longest_module_list(module)
    if not names:
        return [Section("", type(module).__name__, ("",), always_layer=True)]
    items = [Section(name, _class_name(module, (name,)), (name,), always_layer=True) for name in names]
    return [Section(BEFORE, "before", ()), *items, Section(AFTER, "after", ())]


def _class_name(module: nn.Module, names: tuple[str, ...]) -> str:
    """The class of a section's only module with parameters."""
    modules = dict(module.named_modules(remove_duplicate=False))
    with_weights = [name for name in names if name not in modules or any(True for _ in modules[name].parameters())]
    return type(modules[with_weights[0]]).__name__ if len(with_weights) == 1 and with_weights[0] in modules else ""


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
        if has_pipeline_model(module):
            from echelon.planning.model.equal_layers import find_repeats, renamed_weights

            pipeline_model = get_pipeline_model(module)
            counter.enter_section("shared by the layers")
            shared, hidden = pipeline_model.shared(**inputs), None
            repeats = find_repeats(module, shared)
            for layer in pipeline_model.layers:
                if (first := repeats.get(layer.name)) is not None:
                    counter.repeat_section(layer.name, first, renamed_weights(module, layer.name, first))
                    continue
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


def _watch_gathered(module: nn.Module, counter: OpCounter) -> None:
    """Tell a counter that a module runs which gets full sequences under context parallelism."""

    def enter(_module: nn.Module, _args: Any) -> None:
        counter.is_gathering = True

    def leave(_module: nn.Module, *_others: Any) -> None:
        counter.is_gathering = False

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _make_counter(weights: Mapping[str, Tensor], splits: Mapping[str, str]) -> OpCounter:
    """A counter of operators; `splits` are by module, those of weights by name."""
    from echelon.planning.model.op_counter import OpCounter

    return OpCounter(weights, {name: splits.get(name.rpartition(".")[0], UNSPLIT) for name in weights})
