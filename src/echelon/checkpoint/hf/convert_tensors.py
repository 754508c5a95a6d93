"""From one directory's tensors to the other's, by the table of models/hf/param_names.py, a line of it at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from echelon import models
from echelon.checkpoint.hf.safetensors_reader import listed
from echelon.checkpoint.hf.safetensors_writer import Spec
from echelon.models.hf import param_names
from echelon.models.hf.param_names import Change, Pair
from echelon.models.model_config import ModelConfig

Announce = Callable[[int], None]
"""told the bytes of what was converted"""

WIDE = (".gate.bias", ".gate.e_score_correction_bias")
"""of at least float32, whatever the model's type is: a step changes them by less than a shorter type holds"""


class Source(Protocol):
    """A tensor that can be read."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class Given:
    """A tensor in memory, as one that can be read."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class Line:
    """A line of the table, in one direction, with what it makes."""

    sources: tuple[str, ...]
    change: Change
    made: tuple[Spec, ...]


@dataclass(frozen=True)
class Conversion:
    tensors: Mapping[str, Source]
    lines: Sequence[Line]

    @property
    def specs(self) -> list[Spec]:
        return [spec for line in self.lines for spec in line.made]

    def values(self, announce: Announce = lambda _bytes: None) -> Iterator[tuple[str, Tensor]]:
        """In the order of the specs."""
        for line in self.lines:
            found = line.change([self.tensors[name].read() for name in line.sources])
            for spec, tensor in zip(line.made, found, strict=True):
                yield spec.name, tensor.to(spec.dtype)
                announce(spec.bytes)


def to_ours(tensors: Mapping[str, Source], config: ModelConfig, dtype: torch.dtype | None = None) -> Conversion:
    """Strict: every name of theirs, and no other, in the shape that the config says. None keeps the types."""
    prefix = param_names.prefix(tensors, config)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    lines = [
        (pair.theirs, theirs, pair.ours, ours, pair.back)
        for pair, ours, theirs in _shaped(config, stacked=param_names.is_stacked(tensors))
    ]
    return _conversion(tensors, lines, param_names.beside(tensors, config), dtype, config)


def to_theirs(tensors: Mapping[str, Source], config: ModelConfig, dtype: torch.dtype | None = None) -> Conversion:
    """As published files have them."""
    lines = [(pair.ours, ours, pair.theirs, theirs, pair.out) for pair, ours, theirs in _shaped(config, stacked=False)]
    return _conversion(tensors, lines, {"head.weight"} if config.tied else set(), dtype, config)


def _shaped(
    config: ModelConfig, *, stacked: bool
) -> Iterator[tuple[Pair, list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Every line with the shapes of both sides, found on the meta device."""
    ours = models.build(config, "meta").state_dict()
    for pair in param_names.pairs(config, stacked=stacked):
        given = [ours[name] for name in pair.ours]
        yield pair, [tuple(x.shape) for x in given], [tuple(x.shape) for x in pair.out(given)]


Shapes = Sequence[tuple[int, ...]]


def _conversion(
    tensors: Mapping[str, Source],
    lines: Sequence[tuple[tuple[str, ...], Shapes, tuple[str, ...], Shapes, Change]],
    beside: set[str],
    dtype: torch.dtype | None,
    config: ModelConfig,
) -> Conversion:
    wanted = {name: shape for sources, shapes, *_ in lines for name, shape in zip(sources, shapes, strict=True)}
    wrong = [
        f"{name} is {tuple(tensors[name].shape)} in place of {shape}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    said = [
        f"{what}: {listed(found)}"
        for what, found in (
            ("missing", sorted(wanted.keys() - tensors.keys())),
            ("not known", sorted(tensors.keys() - wanted.keys() - beside)),
            ("of another shape", wrong),
        )
        if found
    ]
    if said:
        raise ValueError(
            f"the weights are not those of the config ({config.name}: {'; '.join(said)}); "
            "use the config that they were saved with"
        )
    made = []
    for sources, _, targets, shapes, change in lines:
        own = reduce(torch.promote_types, (tensors[name].dtype for name in sources))
        specs = [Spec(name, shape, type_of(name, own, dtype)) for name, shape in zip(targets, shapes, strict=True)]
        made.append(Line(sources, change, tuple(specs)))
    return Conversion(tensors, made)


def type_of(name: str, own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Of a tensor with this name, where another type may be asked for."""
    found = own if asked is None else asked
    return torch.promote_types(found, torch.float32) if name.endswith(WIDE) else found
