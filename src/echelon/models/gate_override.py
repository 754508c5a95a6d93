"""Another gate for a model's mixtures, as text: its name, with k and its options behind it. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from echelon.layout.validation_error import Fault, FaultError, did_you_mean
from echelon.models.moe_config import MixtureConfig
from echelon.moe import GATES, gate_properties

Value = float | int | str | bool


def with_gate(mixture: MixtureConfig, text: str) -> MixtureConfig:
    """The mixture with a gate such as `switch,capacity_factor=1.5`.

    What is not given is what the gate's paper has: one expert of a token for Switch, two for GShard, else as many as
    before; groups of DeepSeek's have four experts, and a token sees half of them.
    """
    name, *given = (part.strip() for part in text.split(","))
    options: dict[str, Value] = {}
    wrong = []
    for part in given:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            wrong.append(Fault(key="gate", value=part, rule="is not of the form option=value"))
        options[key] = _read(value)
    if name not in GATES:
        rule, hint = "is not the name of a gate", did_you_mean(name, GATES)
        wrong.append(Fault(key="gate", value=name, rule=rule, legal=", ".join(GATES), hint=hint))
    k = options.pop("k", {"switch": 1, "gshard": 2}.get(name, mixture.k))
    if not isinstance(k, int | float) or isinstance(k, bool):
        raise FaultError([*wrong, Fault(key="gate", value=f"k={k}", rule="is not a number")])
    if wrong:
        raise FaultError(wrong)
    if name in gate_properties.LIMITED and "num_groups" not in options:
        options = {**gate_properties.grouped(name, mixture.experts, {}), **options}
    return replace(mixture, gate=name, k=k, options=tuple(options.items()))


def _read(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
