"""`add_lora` freezes a model, and puts adapters beside its linears."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.foreign.causal_lm import ForeignCausalLM, adapt_if_foreign
from echelon.models.foreign.unfuse import FusedLinear, is_linear
from echelon.models.layer_lists import layer_names
from echelon.models.lora.adapter import ADAPTER, LoRAAdapter, adapter_inits, attach_adapter, iter_adapters
from echelon.models.lora.lora_options import LoRAOptions, match_names
from echelon.models.pipeline_model import is_within

EXPERT_LISTS = ("experts",)
"""modules whose linears are of single experts: which tokens pass them differs from step to step"""


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float = 16.0,
    targets: Sequence[str] = (),
    dropout: float = 0.0,
    rslora: bool = False,
    train: Sequence[str] = (),
    seed: int = 0,
) -> Any:
    """Freeze a model and add LoRA adapters to the linears of its layers, in place; return it.

    `targets` are patterns of linears instead of all; `train` are patterns of modules that are trained in full. The
    values of A are functions of `seed` and the parameter's name, so every layout starts from the same.

    >>> model = ec.add_lora(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), rank=2, targets=["0"])
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['0.lora.A', '0.lora.B.0']
    """
    options = LoRAOptions(
        rank=rank, alpha=alpha, targets=tuple(targets), dropout=dropout, rslora=rslora, train=tuple(train)
    )
    return add_adapters(model, options, seed=seed)


def add_adapters(model: nn.Module, options: LoRAOptions, *, seed: int, zero_b: bool = True) -> Any:
    """Add the adapters that the options ask for; none with a rank of 0."""
    if not options.rank:
        return model
    _check(options)
    model = adapt_if_foreign(model)
    if any(True for _ in iter_adapters(model)):
        raise ValueError(f"the model has adapters already ({type(model).__name__}); add them once")
    names = target_linears(model, options.targets)
    trained = _trained_modules(model, options)
    model.requires_grad_(False)
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    for name in names:
        linear = model.get_submodule(name)
        attach_adapter(linear, LoRAAdapter(linear, options, zero_b=zero_b).train(linear.training))
    inits = adapter_inits(model)
    for name, parameter in model.named_parameters():
        if name in inits and not parameter.is_meta:
            inits[name].fill(parameter, seed, name)
    return model


def target_linears(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the linears that patterns match; without patterns, all linears of the layers."""
    linears = adaptable_linears(model)
    if targets:
        return match_names(targets, linears, key="lora.targets", what="linear of the model")
    layers = model.layer_stack.layer_names if isinstance(model, ForeignCausalLM) else layer_names(model)
    inside = [name for name in linears if any(is_within(name, layer) for layer in layers)]
    if not inside:
        message = f"finds no linear in the layers of {type(model).__name__}"
        raise ValidationError.single("lora.rank", "", message, legal="a model with linears, or lora.rank=0")
    return inside


def check_patterns(model: nn.Module, options: LoRAOptions) -> Iterator[ValidationIssue]:
    """Issues of patterns that match nothing."""
    with collect_issues() as issues:
        target_linears(model, options.targets)
    yield from issues
    with collect_issues() as issues:
        _trained_modules(model, options)
    yield from issues


@contextmanager
def collect_issues() -> Iterator[list[ValidationIssue]]:
    issues: list[ValidationIssue] = []
    try:
        yield issues
    except ValidationError as error:
        issues += error.issues


def _trained_modules(model: nn.Module, options: LoRAOptions) -> list[str]:
    return match_names(options.train, trainable_modules(model), key="lora.train", what="module with parameters")


def adaptable_linears(model: nn.Module) -> list[str]:
    """Return the names of all linears but those of experts, attention functions and the language head."""
    head = model.get_output_embeddings() if isinstance(model, ForeignCausalLM) else None  # type: ignore[operator]
    found: list[str] = []
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        # torch's function reads the weight of its output projection, and would not call an adapter
        in_function = isinstance(parent, nn.MultiheadAttention)
        is_expert = any(part in EXPERT_LISTS for part in name.split("."))
        is_part = isinstance(parent, FusedLinear)
        if module is not head and not (in_function or is_expert or is_part):
            found += [name] if name and (is_linear(module) or isinstance(module, FusedLinear)) else []
    return found


def trainable_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that own parameters, which may be trained in full."""
    return [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name and ADAPTER not in name.split(".") and any(True for _ in module.parameters(recurse=False))
    ]


def _check(options: LoRAOptions) -> None:
    """Refuse options that a configuration would refuse."""
    if options.rank < 0 or not 0 <= options.dropout < 1 or not torch.isfinite(torch.tensor(options.alpha)):
        raise ValueError(
            f"invalid adapters (rank={options.rank}, alpha={options.alpha:g}, dropout={options.dropout:g}); "
            "use rank >= 1 and 0 <= dropout < 1"
        )
