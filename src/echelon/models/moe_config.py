"""Configuration of MoE layers, and its override by a gate given as text. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from echelon import moe as gates
from echelon.layout.validation_error import ValidationError, ValidationIssue

GateOption = float | int | str | bool


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """MoE layers: which layers they replace, their experts and their gate."""

    experts: int
    """Routed experts of a layer."""
    k: float
    """Experts per token; the average for expert choice."""
    ffn: int
    """Hidden size of one expert."""
    gate: str
    """The gate's name (echelon.moe.GATES)."""
    options: tuple[tuple[str, GateOption], ...] = ()
    """Options of the gate, by name."""
    shared_ffn: int = 0
    """Hidden size of the shared expert; 0: none."""
    activation: str = "swiglu"
    """swiglu, gelu or relu."""
    dropout: float = 0.0
    """Probability that dropout zeroes a hidden unit of an expert in training."""
    dense_layers: int = 0
    """Dense layers at the start."""
    every: int = 1
    """An MoE layer in every N-th layer, the last of each group of N."""

    def __post_init__(self) -> None:
        errors = [
            f"{name} is less than {least} ({name}={getattr(self, name)})"
            for name, least in (("experts", 1), ("ffn", 1), ("shared_ffn", 0), ("dense_layers", 0), ("every", 1))
            if getattr(self, name) < least
        ]
        if not 0 <= self.dropout < 1:
            errors.append(f"dropout is not in [0, 1) (dropout={self.dropout})")
        if errors:
            raise ValueError("moe: " + "; also ".join(errors))

    @property
    def balances_by_load(self) -> bool:
        """Whether the gate balances by the expert load of each step."""
        return self.gate in gates.LOAD_BALANCED_GATES

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer is an MoE layer."""
        return layer >= self.dense_layers and (layer + 1 - self.dense_layers) % self.every == 0

    def parameters(self, width: int) -> int:
        """Parameters of one layer's gate and routed experts."""
        return self.experts * self._expert_parameters(width) + self._router_parameters(width)

    def active_parameters(self, width: int) -> float:
        """Parameters of one layer's gate and of the routed experts of one token."""
        return self.k * self._expert_parameters(width) + self._router_parameters(width)

    def _expert_parameters(self, width: int) -> int:
        return (3 if self.activation == "swiglu" else 2) * width * self.ffn

    def _router_parameters(self, width: int) -> int:
        return gates.num_router_rows(self.gate, self.experts, dict(self.options)) * width


def override_gate(moe: MoEConfig, text: str) -> MoEConfig:
    """The configuration with another gate, such as `switch,capacity_factor=1.5`.

    Defaults follow the papers: k=1 for Switch, k=2 for GShard, else k is unchanged; DeepSeek's gates get groups of four
    experts, half of which a token may choose.
    """
    name, *given = (part.strip() for part in text.split(","))
    options: dict[str, GateOption] = {}
    errors = []
    for part in given:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            errors.append(ValidationIssue(key="gate", value=part, message="is not option=value"))
        options[key] = _parse_option(value)
    if name not in gates.GATES:
        errors.append(gates.unknown_gate(name))
    k = options.pop("k", {"switch": 1, "gshard": 2}.get(name, moe.k))
    if not isinstance(k, int | float) or isinstance(k, bool):
        raise ValidationError([*errors, ValidationIssue(key="gate", value=f"k={k}", message="is not a number")])
    if errors:
        raise ValidationError(errors)
    if name in gates.GROUP_LIMITED_GATES and "num_groups" not in options:
        options = {**gates.group_options(name, moe.experts, {}), **options}
    return replace(moe, gate=name, k=k, options=tuple(options.items()))


def _parse_option(text: str) -> GateOption:
    if text in ("true", "false"):
        return text == "true"
    for parse in (int, float):
        with suppress(ValueError):
            return parse(text)
    return text
