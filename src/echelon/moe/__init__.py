"""Mixture of experts on one device: gates, which decide who sees what. Importing this loads no torch."""

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
    """Classes by name, imported when they are asked for."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[Gate]:
        module, kind = self._places[name]
        found: type[Gate] = getattr(import_module(f"echelon.moe.gates.{module}"), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
    """The gate of this name for vectors of this width.

    `k` is how many experts see a token; for expert choice the average of it, the paper's capacity factor. In causal
    training a gate that lets later tokens change an earlier one's experts is warned about.
    """
    if name not in GATES:
        rule, legal = "is not the name of a gate", ", ".join(GATES)
        raise ValidationError(
            [ValidationIssue(key="gate", value=name, message=rule, legal=legal, hint=did_you_mean(name, GATES))]
        )
    kind = GATES[name]
    known = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]
    rule, legal = f"is not an option of the gate {name}", ", ".join(known) or "none"
    wrong = [
        ValidationIssue(key=key, value=str(value), message=rule, legal=legal, hint=did_you_mean(key, known))
        for key, value in options.items()
        if key not in known
    ]
    if wrong:
        raise ValidationError(wrong)
    gate = kind(width, num_experts, k, **options)
    if causal and gate.leaks_future:
        warnings.warn(
            f"gate {name} lets later tokens of a sequence change which experts see an earlier one: in causal training "
            "the model can read the future, and cannot when it writes; use a gate that does not leak "
            "(gate.leaks_future)",
            stacklevel=2,
        )
    return gate
