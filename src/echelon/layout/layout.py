"""`Layout`: how a one-device model is laid out over many ranks, as data with a round-trip text form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from echelon.layout import grammar
from echelon.layout.validation_error import ValidationError, ValidationIssue

DERIVED = -1
"""Marks a key to derive from the others; no finished layout holds it."""

MULTI_CHUNK_SCHEDULES = ("interleaved", "zb-v", "dualpipe-v")
"""Schedules in which a rank holds more than one chunk of layers."""
SPLIT_BACKWARD_SCHEDULES = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that split backward and defer the weight gradients."""
ASYNC_SCHEDULES = ("pipedream", "pipedream-vsync", "2bw")
"""Schedules that update without draining the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees and policies of a run. Always complete: keys that are not given are derived at once.

    >>> str(ec.Layout.parse("tp=2, zero=1", world=8))
    'dp=4,zero=1,tp=2'
    """

    dp: int = 1
    """data-parallel ranks"""
    zero: int = DERIVED
    """0 replicates; 1 shards optimizer states over dp, 2 gradients too, 3 parameters too"""
    shard: int = DERIVED
    """dp ranks that form one set of shards; dp / shard sets are replicas of each other"""
    tp: int = 1
    """tensor-parallel ranks"""
    tp_kind: str = "1d"
    """1d, 2d, 2.5d or 3d"""
    depth: int = 1
    """layers of 2.5d's grid"""
    sp: int = DERIVED
    """1 if norms and residuals are sharded over tp by position"""
    cp: int = 1
    """context-parallel ranks"""
    cp_kind: str = "ring"
    """ring, ulysses, gather or ring-ulysses"""
    ulysses: int = DERIVED
    """ranks of cp that exchange heads; the ring runs over cp / ulysses"""
    pp: int = 1
    """pipeline ranks"""
    schedule: str = "1f1b"
    """pipeline schedule"""
    vpp: int = DERIVED
    """chunks of layers per pipeline rank"""
    ep: int = 1
    """expert-parallel ranks, folded into dp x cp x tp"""
    etp: int = 1
    """tensor-parallel ranks inside an expert"""
    ep_inner: int = 1
    """ranks of ep x etp that share a node, for hierarchical all-to-all; 1: one flat all-to-all"""
    microbatch: int = 1
    """sequences per rank and microbatch"""
    accumulate: int = 1
    """microbatches per step"""
    recompute: str = "none"
    """what is recomputed in the backward pass"""
    offload: str = "none"
    """what is offloaded from the device, joined by +"""

    def __post_init__(self) -> None:
        derived = self._derived_defaults()
        issues = []
        for key in grammar.KEYS:
            value = getattr(self, key.name)
            if key.name in derived and value == DERIVED:
                object.__setattr__(self, key.name, derived[key.name])
            elif not key.syntax.is_legal(value):
                rule = "is not a legal value"
                issues.append(ValidationIssue(key=key.name, value=str(value), message=rule, legal=key.syntax.legal))
        if issues:
            raise ValidationError(issues)

    def _derived_defaults(self) -> dict[str, int]:
        """Return the defaults that depend on other keys; only zero depends on another of them, `shard`."""
        hybrid = self.shard not in (DERIVED, self.dp)
        return {
            "zero": 1 if self.pp > 1 else 3 if hybrid else 0,
            "shard": self.dp,
            "sp": 1 if self.tp > 1 and self.tp_kind == "1d" and self.schedule != "terapipe" else 0,
            "ulysses": self.cp if self.cp_kind == "ulysses" else 1,
            "vpp": 2 if self.schedule in MULTI_CHUNK_SCHEDULES else 1,
        }

    @classmethod
    def resolve(cls, given: Mapping[str, Any], *, world: int | None = None, batch: int | None = None) -> Self:
        """Return the layout of the given keys: dp fills the world, microbatch x accumulate the batch.

        If they do not divide, the layout is smaller than the world or the batch, and a rule reports it.
        """
        values = dict(given)
        if world is not None:
            rest = values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1)
            values.setdefault("dp", max(1, world // rest))
        if batch is not None:
            per_rank = max(1, batch // values.get("dp", 1))
            if "microbatch" in values:
                values.setdefault("accumulate", max(1, per_rank // values["microbatch"]))
            else:
                values.setdefault("accumulate", 1)
                values["microbatch"] = max(1, per_rank // values["accumulate"])
        return cls(**values)

    @classmethod
    def parse(cls, text: str, *, world: int | None = None, batch: int | None = None) -> Layout:
        """Parse one layout. Raises ValidationError with every issue of the text, of the world and of the batch.

        `echelon.layout.check_layout` checks the rules between the keys, and between them and a model.
        """
        # rules.py imports this module; this is the one import in the other direction.
        from echelon.layout.parse import parse_layout
        from echelon.layout.rules import SIZE_RULES, LayoutConstraints

        return parse_layout(text, LayoutConstraints(world=world, batch=batch), SIZE_RULES)

    @classmethod
    def parse_many(cls, text: str, *, world: int | None = None, batch: int | None = None) -> list[Layout]:
        """Parse layouts between semicolons. Raises ValidationError with the issues of all of them."""
        from echelon.layout.parse import parse_layouts
        from echelon.layout.rules import SIZE_RULES, LayoutConstraints

        return parse_layouts(text, LayoutConstraints(world=world, batch=batch), SIZE_RULES)

    @property
    def explicit(self) -> dict[str, int | str]:
        """dp and every key that differs from its default: the keys of the text form."""
        derived = self._derived_defaults()
        defaults = {f.name: derived.get(f.name, f.default) for f in fields(self)}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if name == "dp" or value != defaults[name]}

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.explicit.items())

    def replace(self, **changes: int | str) -> Layout:
        """Return a layout with some keys changed; derived keys follow (shard follows dp, sp follows tp)."""
        return type(self).resolve({**self.explicit, **changes})

    def diff(self, other: Layout) -> str:
        """Return what changes from this layout to the other, key by key; empty if they are equal."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_shards(self) -> int:
        """Ranks that shard the states: `shard`, or 1 under zero=0."""
        return self.shard if self.zero else 1

    @property
    def num_expert_shards(self) -> int:
        """Ranks that shard the same experts: the copies in an HSDP group (shard x cp x tp ranks), or 1."""
        return max(1, self.shard * self.cp * self.tp // (self.ep * self.etp)) if self.zero else 1

    @property
    def batch(self) -> int:
        """Global batch: sequences per step."""
        return self.dp * self.microbatch * self.accumulate
