"""MoE layers on one device: gates, routing, experts. Importing this loads no torch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

if TYPE_CHECKING:
    from echelon.moe.gates.gate import Gate

__all__ = ["GATES", "build_gate"]


class _LazyGates(Mapping[str, "type[Gate]"]):
    """Gate classes by name, imported on first use."""

    def __init__(self, modules: Mapping[str, tuple[str, str]]) -> None:
        self._modules = modules

    def __getitem__(self, name: str) -> type[Gate]:
        module, class_name = self._modules[name]
        gate: type[Gate] = getattr(import_module(f"echelon.moe.gates.{module}"), class_name)
        return gate

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


GATES: Mapping[str, type[Gate]] = _LazyGates(
    {
        "noisy-top-k": ("noisy_top_k", "NoisyTopK"),
        "hierarchical": ("hierarchical", "Hierarchical"),
        "gshard": ("gshard", "GShard"),
        "switch": ("switch", "Switch"),
        "expert-choice": ("expert_choice", "ExpertChoice"),
        "expert-choice-capped": ("capped_expert_choice", "CappedExpertChoice"),
        "mixtral": ("top_k", "Mixtral"),
        "qwen": ("top_k", "Qwen"),
        "loss-free": ("loss_free", "LossFree"),
        "deepseek-v2": ("deepseek_v2", "DeepSeekV2"),
        "deepseek-v3": ("deepseek_v3", "DeepSeekV3"),
    }
)


def build_gate(name: str, width: int, num_experts: int, k: float, *, causal: bool = False, **options: Any) -> Gate:
    """Build a gate by name.

    `k` is the experts per token; for expert choice their average, the paper's capacity factor. Warns if a gate leaks
    future tokens in causal training.
    """
    if name not in GATES:
        rule, legal = "is an unknown gate", ", ".join(GATES)
        raise ValidationError(
            [ValidationIssue(key="gate", value=name, message=rule, legal=legal, hint=did_you_mean(name, GATES))]
        )
    gate_class = GATES[name]
    known = [p.name for p in inspect.signature(gate_class).parameters.values() if p.kind is p.KEYWORD_ONLY]
    rule, legal = f"is not an option of the gate {name}", ", ".join(known) or "none"
    wrong = [
        ValidationIssue(key=key, value=str(value), message=rule, legal=legal, hint=did_you_mean(key, known))
        for key, value in options.items()
        if key not in known
    ]
    if wrong:
        raise ValidationError(wrong)
    gate = gate_class(width, num_experts, k, **options)
    if causal and gate.leaks_future:
        warnings.warn(
            f"gate {name} leaks future tokens: later tokens of a sequence change the experts of earlier ones, which "
            "causal training can exploit and generation cannot; use a gate with leaks_future=False",
            stacklevel=2,
        )
    return gate
