"""Expert load of a layer in a step, and load balance over all layers. No torch: reports of a run read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class ExpertLoad:
    """Tokens per expert of one MoE layer in one step."""

    layer: str
    most: float
    """max/mean expert load"""
    entropy: float
    """normalised entropy of the loads: 1 is balanced, 0 is one expert for all tokens"""
    dead: int
    """experts without a token"""
    dropped: int
    """dropped assignments, beyond the capacity"""
    assigned: int
    """all assignments of tokens to experts, including dropped ones"""
    counts: tuple[int, ...]
    """load of each expert, before dropping"""

    @classmethod
    def from_counts(cls, layer: str, counts: Sequence[int], dropped: int) -> Self:
        total, experts = sum(counts), len(counts)
        # Without tokens, or with one expert, the load is balanced.
        entropy = 1.0
        if total and experts > 1:
            shares = (count / total for count in counts if count)
            entropy = max(0.0, -math.fsum(share * math.log(share) for share in shares) / math.log(experts))
        most = max(counts) * experts / total if total else 0.0
        return cls(layer, most, entropy, counts.count(0), dropped, total, tuple(counts))

    def record(self, *, with_counts: bool = True) -> dict[str, Any]:
        """Return the fields of the log record."""
        names = [name for name in self.__dataclass_fields__ if with_counts or name != "counts"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class LoadBalance:
    """Load balance of a step: the worst value over all layers, and its layer."""

    most: float
    most_layer: str
    entropy: float
    """the lowest"""
    entropy_layer: str
    dead: int
    """over all layers, out of `experts`"""
    dead_layer: str
    """layer with most of them"""
    experts: int
    dropped: int
    """over all layers, out of `assigned`"""
    dropped_layer: str
    """layer with most of them"""
    assigned: int

    @classmethod
    def from_loads(cls, loads: Sequence[ExpertLoad]) -> Self:
        """Summarise at least one layer."""
        most = max(loads, key=lambda load: load.most)
        least = min(loads, key=lambda load: load.entropy)
        deadest = max(loads, key=lambda load: load.dead)
        fullest = max(loads, key=lambda load: load.dropped)
        return cls(
            most=most.most,
            most_layer=most.layer,
            entropy=least.entropy,
            entropy_layer=least.layer,
            dead=sum(load.dead for load in loads),
            dead_layer=deadest.layer,
            experts=sum(len(load.counts) for load in loads),
            dropped=sum(load.dropped for load in loads),
            dropped_layer=fullest.layer,
            assigned=sum(load.assigned for load in loads),
        )

    @property
    def dropped_share(self) -> float:
        return self.dropped / self.assigned if self.assigned else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "dropped_share": self.dropped_share}

    def figures(self) -> list[tuple[str, str, bool]]:
        """Return (name, value, is suspicious) of each figure, for the display."""
        dead = f"{self.dead} of {self.experts}" + (_in(self.dead_layer) if self.dead else "")
        dropped = _percent(self.dropped_share) + (_in(self.dropped_layer) if self.dropped else "")
        return [
            ("max/mean", f"{self.most:.2f}{_in(self.most_layer)}", self.most >= 4),
            ("entropy", f"{self.entropy:.2f}{_in(self.entropy_layer)}", self.entropy < 0.5),
            ("dead", dead, self.dead > 0),
            ("dropped", dropped, self.dropped > 0),
        ]


def logs_counts(step: int) -> bool:
    """Return whether the log has the load of every expert in this step: up to 1000 of all, then of every tenth, …

    A table of 60 layers with 256 experts is 60 kB. The figures of a layer are logged in every step.
    """
    return step % int(10 ** max(0, len(str(step)) - 3)) == 0


def short_layer_name(layer: str) -> str:
    """`blocks.7` for `blocks.7.mlp`."""
    parts = layer.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else layer


def _in(layer: str) -> str:
    return f" ({short_layer_name(layer)})" if layer else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 or not share else "<0.1 %"
