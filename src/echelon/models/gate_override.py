"""Another gate for a model's mixtures, as text: its name, with k and its options behind it. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.models.moe_config import MoEConfig
from echelon.moe import GATES, gate_properties

GateOption = float | int | str | bool


def override_gate(mixture: MoEConfig, text: str) -> MoEConfig:
    """The mixture with a gate such as `switch,capacity_factor=1.5`.

    What is not given is what the gate's paper has: one expert of a token for Switch, two for GShard, else as many as
    before; groups of DeepSeek's have four experts, and a token sees half of them.
    """
    name, *given = (part.strip() for part in text.split(","))
    options: dict[str, GateOption] = {}
    wrong = []
    for part in given:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            wrong.append(ValidationIssue(key="gate", value=part, message="is not of the form option=value"))
        options[key] = _parse_option(value)
    if name not in GATES:
        rule, hint = "is not the name of a gate", did_you_mean(name, GATES)
        wrong.append(ValidationIssue(key="gate", value=name, message=rule, legal=", ".join(GATES), hint=hint))
    k = options.pop("k", {"switch": 1, "gshard": 2}.get(name, mixture.k))
    if not isinstance(k, int | float) or isinstance(k, bool):
        raise ValidationError([*wrong, ValidationIssue(key="gate", value=f"k={k}", message="is not a number")])
    if wrong:
        raise ValidationError(wrong)
    if name in gate_properties.GROUP_LIMITED_GATES and "num_groups" not in options:
        options = {**gate_properties.group_options(name, mixture.experts, {}), **options}
    return replace(mixture, gate=name, k=k, options=tuple(options.items()))


def _parse_option(text: str) -> GateOption:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
