"""`PipelineProfile`: the time and the bytes of each layer of a model, measured in a run or predicted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.input_file import parse_json, read_text

SOURCES = ("measured", "predicted")


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer, on one rank, for one microbatch."""

    name: str
    forward_s: float
    input_s: float
    """the half of backward that computes the input gradient"""
    weight_s: float
    """the half of backward that computes the weight gradients"""
    activation_bytes: int
    """of its output; the gradient has the same size"""
    parameter_bytes: int
    """of its weights, which replicas of a stage all-reduce"""

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            is_integer = field.name.endswith("_bytes")
            if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
                kind = "an integer" if is_integer else "a number"
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
            raise ValueError(f"unknown source of a profile ({self.source!r}); use {' or '.join(SOURCES)}")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or not self.links:
            problem = f"names twice: {', '.join(twice)}" if twice else "no layers"
            raise ValueError(f"a profile does not list the layers of a model ({problem}); give every layer once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(link.name for link in self.links)

    @property
    def layer_seconds(self) -> tuple[float, ...]:
        """Of every layer, forward and backward."""
        return tuple(link.seconds for link in self.links)

    @property
    def seconds_by_name(self) -> dict[str, float]:
        """Seconds of every layer, forward and backward, by name."""
        return dict(zip(self.names, self.layer_seconds, strict=True))

    def to_json(self) -> str:
        """JSON that `from_json` reads back exactly."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PipelineProfile:
        return cls.from_json(read_text(path))

    @classmethod
    def from_json(cls, text: str) -> PipelineProfile:
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ValueError(f"a profile is not JSON ({error}); write it with Profile.to_json") from error
        _check_keys("a profile", value, cls)
        if not isinstance(value["links"], list):
            raise ValueError(f"a profile's links are not a list ({value['links']!r}); give one object per layer")
        for link in value["links"]:
            _check_keys("a link of a profile", link, LayerProfile)
        return cls(links=tuple(LayerProfile(**link) for link in value["links"]), source=value["source"])


def _check_keys(subject: str, value: Any, record: type[PipelineProfile] | type[LayerProfile]) -> None:
    keys = {field.name for field in fields(record)}
    if not isinstance(value, Mapping) or set(value) != keys:
        given = f"keys {', '.join(sorted(value)) or 'none'}" if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"{subject} has the wrong keys ({given}); give {', '.join(sorted(keys))}")
