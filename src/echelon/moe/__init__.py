"""MoE layers on one device: gates, routing, experts. Importing this loads no torch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

if TYPE_CHECKING:
    from echelon.moe.gates.gate import Gate

__all__ = ["GATES", "build_gate", "gate_class"]


GATES: Mapping[str, tuple[str, str]] = {
    "noisy-top-k": ("noisy_top_k", "NoisyTopK"),
    "hierarchical": ("noisy_top_k", "Hierarchical"),
    "gshard": ("gshard", "GShard"),
    "switch": ("switch", "Switch"),
    "expert-choice": ("expert_choice", "ExpertChoice"),
    "expert-choice-capped": ("expert_choice", "CappedExpertChoice"),
    "mixtral": ("top_k", "Mixtral"),
    "qwen": ("top_k", "Qwen"),
    "loss-free": ("loss_free", "LossFree"),
    "deepseek-v2": ("deepseek_v2", "DeepSeekV2"),
    "deepseek-v3": ("deepseek_v3", "DeepSeekV3"),
}
"""module and class by name"""


def gate_class(name: str) -> type[Gate]:
    """The class of a gate, imported on first use."""
    module, class_name = GATES[name]
    gate: type[Gate] = getattr(import_module(f"echelon.moe.gates.{module}"), class_name)
    return gate


def unknown_gate(name: str) -> ValidationIssue:
    message, legal, hint = "is an unknown gate", ", ".join(GATES), did_you_mean(name, GATES)
    return ValidationIssue(key="gate", value=name, message=message, legal=legal, hint=hint)


def build_gate(name: str, width: int, num_experts: int, k: float, *, causal: bool = False, **options: Any) -> Gate:
    """Build a gate by name.

    `k` is the experts per token; for expert choice their average, the paper's capacity factor. Warns if a gate leaks
    future tokens in causal training.
    """
    if name not in GATES:
        raise ValidationError([unknown_gate(name)])
    known = [p.name for p in inspect.signature(gate_class(name)).parameters.values() if p.kind is p.KEYWORD_ONLY]
    rule, legal = f"is not an option of the gate {name}", ", ".join(known) or "none"
    wrong = [
        ValidationIssue(key=key, value=str(value), message=rule, legal=legal, hint=did_you_mean(key, known))
        for key, value in options.items()
        if key not in known
    ]
    if wrong:
        raise ValidationError(wrong)
    gate = gate_class(name)(width, num_experts, k, **options)
    if causal and gate.leaks_future:
        warnings.warn(
            f"gate {name} leaks future tokens: later tokens of a sequence change the experts of earlier ones, which "
            "causal training can exploit and generation cannot; use a gate with leaks_future=False",
            stacklevel=2,
        )
    return gate
