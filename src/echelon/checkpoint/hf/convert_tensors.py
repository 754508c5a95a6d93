"""From one directory's tensors to the other's, by the table of models/hf/param_names.py, a line of it at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from echelon import models
from echelon.checkpoint.hf.safetensors_reader import format_names
from echelon.checkpoint.hf.safetensors_writer import SafetensorSpec
from echelon.models.hf import param_names
from echelon.models.hf.param_names import ParamMapping, TensorTransform
from echelon.models.model_config import ModelConfig

ReportBytes = Callable[[int], None]
"""told the bytes of what was converted"""

FP32_SUFFIXES = (".gate.bias", ".gate.e_score_correction_bias")
"""of at least float32, whatever the model's type is: a step changes them by less than a shorter type holds"""


class TensorSource(Protocol):
    """A tensor that can be read."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class InMemoryTensor:
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
class ConversionStep:
    """A line of the table, in one direction, with what it makes."""

    sources: tuple[str, ...]
    transform: TensorTransform
    outputs: tuple[SafetensorSpec, ...]


@dataclass(frozen=True)
class Conversion:
    tensors: Mapping[str, TensorSource]
    steps: Sequence[ConversionStep]

    @property
    def specs(self) -> list[SafetensorSpec]:
        return [spec for line in self.steps for spec in line.outputs]

    def convert(self, report: ReportBytes = lambda _bytes: None) -> Iterator[tuple[str, Tensor]]:
        """In the order of the specs."""
        for line in self.steps:
            found = line.transform([self.tensors[name].read() for name in line.sources])
            for spec, tensor in zip(line.outputs, found, strict=True):
                yield spec.name, tensor.to(spec.dtype)
                report(spec.num_bytes)


def hf_to_native(
    tensors: Mapping[str, TensorSource], config: ModelConfig, dtype: torch.dtype | None = None
) -> Conversion:
    """Strict: every name of theirs, and no other, in the shape that the config says. None keeps the types."""
    prefix = param_names.missing_prefix(tensors, config)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    lines = [
        (pair.hf, theirs, pair.native, ours, pair.from_hf)
        for pair, ours, theirs in _mappings_with_shapes(config, stacked=param_names.has_stacked_experts(tensors))
    ]
    return _build_conversion(tensors, lines, param_names.ignored_names(tensors, config), dtype, config)


def native_to_hf(
    tensors: Mapping[str, TensorSource], config: ModelConfig, dtype: torch.dtype | None = None
) -> Conversion:
    """As published files have them."""
    lines = [
        (pair.native, ours, pair.hf, theirs, pair.to_hf)
        for pair, ours, theirs in _mappings_with_shapes(config, stacked=False)
    ]
    return _build_conversion(tensors, lines, {"head.weight"} if config.tied else set(), dtype, config)


def _mappings_with_shapes(
    config: ModelConfig, *, stacked: bool
) -> Iterator[tuple[ParamMapping, list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Every line with the shapes of both sides, found on the meta device."""
    ours = models.build(config, "meta").state_dict()
    for pair in param_names.param_mappings(config, stacked=stacked):
        given = [ours[name] for name in pair.native]
        yield pair, [tuple(x.shape) for x in given], [tuple(x.shape) for x in pair.to_hf(given)]


Shapes = Sequence[tuple[int, ...]]


def _build_conversion(
    tensors: Mapping[str, TensorSource],
    lines: Sequence[tuple[tuple[str, ...], Shapes, tuple[str, ...], Shapes, TensorTransform]],
    ignored: set[str],
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
        f"{what}: {format_names(found)}"
        for what, found in (
            ("missing", sorted(wanted.keys() - tensors.keys())),
            ("not known", sorted(tensors.keys() - wanted.keys() - ignored)),
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
        specs = [
            SafetensorSpec(name, shape, stored_dtype(name, own, dtype))
            for name, shape in zip(targets, shapes, strict=True)
        ]
        made.append(ConversionStep(sources, change, tuple(specs)))
    return Conversion(tensors, made)


def stored_dtype(name: str, current: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    """Of a tensor with this name, where another type may be asked for."""
    found = current if requested is None else requested
    return torch.promote_types(found, torch.float32) if name.endswith(FP32_SUFFIXES) else found
