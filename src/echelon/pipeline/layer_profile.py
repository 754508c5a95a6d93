"""`Profile`: what each link of a model takes and hands on, measured in a run or predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SOURCES = ("measured", "predicted")


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One link, on one rank, for one microbatch."""

    name: str
    forward_s: float
    input_s: float
    """the half of backward that makes the gradient of the link's input"""
    weight_s: float
    """the half of backward that makes the gradients of its weights"""
    activation_bytes: int
    """what it hands to the next link; its gradient comes back in the same size"""
    parameter_bytes: int
    """its weights: what replicas of a stage all-reduce"""

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            whole = field.name.endswith("_bytes")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"a profile's {field.name} is not {kind} ({self.name}: {value!r}); give {kind}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a profile's {field.name} is out of range ({self.name}: {value}); give 0 or more")

    @property
    def seconds(self) -> float:
        """Forward and backward: PipeDream's T."""
        return self.forward_s + self.input_s + self.weight_s


@dataclass(frozen=True, kw_only=True)
class PipelineProfile:
    links: tuple[LayerProfile, ...]
    """in the order of the model"""
    source: str
    """`measured` or `predicted`"""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"a profile has another source ({self.source!r}); use {' or '.join(SOURCES)}")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or not self.links:
            found = f"names twice: {', '.join(twice)}" if twice else "no links"
            raise ValueError(f"a profile does not list the links of a model ({found}); give every link once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(link.name for link in self.links)

    @property
    def layer_seconds(self) -> tuple[float, ...]:
        """Of every link, forward and backward."""
        return tuple(link.seconds for link in self.links)

    @property
    def seconds_by_name(self) -> dict[str, float]:
        """The same, by name."""
        return dict(zip(self.names, self.layer_seconds, strict=True))

    def to_json(self) -> str:
        """Numbers are written so that reading gives back the same ones."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PipelineProfile:
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a profile is not JSON ({error}); write it with Profile.to_json") from error
        _check_keys("a profile", found, cls)
        if not isinstance(found["links"], list):
            raise ValueError(f"a profile's links are not a list ({found['links']!r}); give one object per link")
        for link in found["links"]:
            _check_keys("a link of a profile", link, LayerProfile)
        return cls(links=tuple(LayerProfile(**link) for link in found["links"]), source=found["source"])


def _check_keys(subject: str, value: Any, record: type[PipelineProfile] | type[LayerProfile]) -> None:
    keys = {field.name for field in fields(record)}
    if not isinstance(value, Mapping) or set(value) != keys:
        given = f"keys {', '.join(sorted(value)) or 'none'}" if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"{subject} has not the keys it needs ({given}); give {', '.join(sorted(keys))}")
