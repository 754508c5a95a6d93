"""What is said of a model's mixtures of experts. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.moe import GATES, gate_properties

GateOptions = tuple[tuple[str, float | int | str | bool], ...]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Layers whose feed-forward part is one of many, chosen for each token."""

    experts: int
    """Experts of a layer that a gate chooses from."""
    k: float
    """Experts of a token; where experts choose, the average."""
    ffn: int
    """Hidden size of one expert."""
    gate: str
    """The gate's name (echelon.moe.GATES)."""
    options: GateOptions = ()
    """The gate's options, by name."""
    shared_ffn: int = 0
    """Hidden size of an expert that every token passes through; 0: there is none."""
    activation: str = "swiglu"
    """swiglu, gelu or relu."""
    dropout: float = 0.0
    """Probability that dropout zeroes a hidden unit of an expert in training."""
    dense_layers: int = 0
    """Layers at the start that have no experts."""
    every: int = 1
    """A mixture in every so many-th layer, the last of each group."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is less than {least} ({name}={getattr(self, name)})"
            for name, least in (("experts", 1), ("ffn", 1), ("shared_ffn", 0), ("dense_layers", 0), ("every", 1))
            if getattr(self, name) < least
        ]
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout is not in [0, 1) (dropout={self.dropout})")
        if wrong:
            raise ValueError("mixture: " + "; also ".join(wrong))

    @property
    def balances_by_load(self) -> bool:
        """Its gate must be told the loads of every step."""
        return self.gate in gate_properties.LOAD_BALANCED_GATES

    def is_moe_layer(self, layer: int) -> bool:
        """Layer number `layer` has experts."""
        return layer >= self.dense_layers and (layer + 1 - self.dense_layers) % self.every == 0

    def parameters(self, width: int) -> int:
        """Of one layer's gate and experts in all, without the shared one, which is of the model's family."""
        return self.experts * self._expert_parameters(width) + self._router_parameters(width)

    def active_parameters(self, width: int) -> float:
        """Of these, what one token passes through."""
        return self.k * self._expert_parameters(width) + self._router_parameters(width)

    def reduced(self, scale: float) -> MoEConfig:
        """With few experts, of a hidden size that is so much smaller or less, and no more than one layer without."""
        experts, options, k = min(self.experts, 16), dict(self.options), min(self.k, 4)
        if "num_groups" in options:
            options = gate_properties.group_options(self.gate, experts, options)
        return replace(
            self,
            experts=experts,
            k=k,
            ffn=max(min(round(self.ffn * scale), 256 // experts), 8),
            options=tuple(options.items()),
            shared_ffn=max(min(round(self.shared_ffn * scale), 64), 8) if self.shared_ffn else 0,
            dense_layers=min(self.dense_layers, 1),
        )

    def _expert_parameters(self, width: int) -> int:
        return (3 if self.activation == "swiglu" else 2) * width * self.ffn

    def _router_parameters(self, width: int) -> int:
        return gate_properties.num_router_rows(self.gate, self.experts, dict(self.options)) * width


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
