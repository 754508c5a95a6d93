"""MoE layers on one device: gates by name, routing, experts. Importing this loads no torch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

if TYPE_CHECKING:
    from echelon.moe.gates.gate import Gate


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
LOAD_BALANCED_GATES = ("loss-free", "deepseek-v3")
"""gates that balance by the expert load of each step"""
GROUP_LIMITED_GATES = ("deepseek-v2", "deepseek-v3")
"""gates that limit a token to experts of a few groups"""
DEFAULT_GROUP_SIZE = 4
"""default experts per group"""


def most_square_divisor(num_experts: int) -> int:
    """The largest divisor up to the square root: both levels of a hierarchy choose among few."""
    candidates = range(1, max(num_experts, 1) + 1)
    return max(a for a in candidates if a == 1 or (num_experts % a == 0 and a * a <= num_experts))


def num_router_rows(gate: str, num_experts: int, options: Mapping[str, Any]) -> int:
    """Rows of all router weights of a gate."""
    if gate == "noisy-top-k":
        return 2 * num_experts
    if gate == "hierarchical":
        return 2 * (num_experts + int(options.get("num_groups") or most_square_divisor(num_experts)))
    return num_experts


def group_options(gate: str, num_experts: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a gate with groups that suit the number of experts."""
    others = {key: value for key, value in options.items() if key not in ("num_groups", "group_limit")}
    if gate not in GROUP_LIMITED_GATES:
        return others  # the hierarchical gate derives its groups
    # As many groups of about that size as divide the experts.
    groups = max(n for n in range(1, max(num_experts // DEFAULT_GROUP_SIZE, 1) + 1) if num_experts % n == 0)
    return {**others, "num_groups": groups, "group_limit": max(groups // 2, 1)}


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
