"""What is said of a model's mixtures of experts. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from echelon.layout.faults import Fault, FaultError, did_you_mean
from echelon.moe import GATES

Options = tuple[tuple[str, float | int | str | bool], ...]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Layers whose feed-forward part is one of many, chosen for each token."""

    experts: int
    """Experts of a layer that a gate chooses from."""
    k: float
    """Experts of a token; where experts choose, the average."""
    ffn: int
    """Hidden size of one expert."""
    gate: str
    """The gate's name (echelon.moe.GATES)."""
    options: Options = ()
    """The gate's options, by name."""
    shared: int = 0
    """Hidden size of an expert that every token passes through; 0: there is none."""
    activation: str = "swiglu"
    """swiglu, gelu or relu."""
    dropout: float = 0.0
    """Probability that dropout zeroes a hidden unit of an expert in training."""
    dense: int = 0
    """Layers at the start that have no experts."""
    every: int = 1
    """A mixture in every so many-th layer, the last of each group."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is less than {least} ({name}={getattr(self, name)})"
            for name, least in (("experts", 1), ("ffn", 1), ("shared", 0), ("dense", 0), ("every", 1))
            if getattr(self, name) < least
        ]
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout is not in [0, 1) (dropout={self.dropout})")
        if wrong:
            raise ValueError("mixture: " + "; also ".join(wrong))

    def is_mixture(self, layer: int) -> bool:
        """Layer number `layer` has experts."""
        return layer >= self.dense and (layer + 1 - self.dense) % self.every == 0

    def parameters(self, width: int) -> int:
        """Of one layer's gate and experts in all, without the shared one, which is of the model's family."""
        return self.experts * (self._expert(width) + width) + self._more(width)

    def active(self, width: int) -> float:
        """Of these, what one token passes through."""
        return self.k * self._expert(width) + self.experts * width

    def reduced(self, smaller: float) -> MixtureConfig:
        """With few experts, of a hidden size that is so much smaller or less, and no more than one layer without."""
        experts, options = min(self.experts, 16), dict(self.options)
        groups = int(options.get("num_groups", 1))
        k = min(self.k, 4)
        if groups > 1:
            # Groups of four, so that a choice between groups and one inside them remain.
            groups = max(experts // 4, 1)
            options.update(num_groups=groups, group_limit=max(groups // 2, 1))
        return replace(
            self,
            experts=experts,
            k=k,
            ffn=max(min(round(self.ffn * smaller), 256 // experts), 8),
            options=tuple(options.items()),
            shared=max(min(round(self.shared * smaller), 64), 8) if self.shared else 0,
            dense=min(self.dense, 1),
        )

    def _expert(self, width: int) -> int:
        return (3 if self.activation == "swiglu" else 2) * width * self.ffn

    def _more(self, width: int) -> int:
        """Routers that a gate has beside one row for each expert."""
        if self.gate == "noisy-top-k":
            return self.experts * width
        return 0


def with_gate(mixture: MixtureConfig, text: str) -> MixtureConfig:
    """With another gate: its name, and k and options behind commas, such as `switch,capacity_factor=1.5`.

    What is not given is what the gate's paper has: one expert of a token for Switch, two for GShard, else as many as
    before; groups of DeepSeek's have four experts, and a token sees half of them.
    """
    name, *given = (part.strip() for part in text.split(","))
    options: dict[str, float | int | str | bool] = {}
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
    if name.startswith("deepseek") and "num_groups" not in options:
        groups = max(mixture.experts // 4, 1)
        options |= {"num_groups": groups, "group_limit": options.get("group_limit", max(groups // 2, 1))}
    return replace(
        mixture, gate=name, k=float(k) if name.startswith("expert-choice") else k, options=tuple(options.items())
    )


def _read(text: str) -> float | int | str | bool:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
