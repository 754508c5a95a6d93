"""Converts tensors between Hugging Face names and ours, one mapping of models/hf/param_names.py at a time."""

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
"""called with the bytes of each converted tensor"""

FP32_SUFFIXES = (".gate.bias", ".gate.e_score_correction_bias")
"""tensors of at least float32, whatever the model's dtype: a step changes them by less than 16 bits resolve"""


class TensorSource(Protocol):
    """A tensor that can be read."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class ComputedTensor:
    """A source whose values a function returns."""

    shape: Sequence[int]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def in_memory(tensor: Tensor) -> ComputedTensor:
    return ComputedTensor(tensor.shape, tensor.dtype, lambda: tensor)


@dataclass(frozen=True)
class ConversionStep:
    """A parameter mapping in one direction, with the tensors that it produces."""

    sources: tuple[str, ...]
    transform: TensorTransform
    outputs: tuple[SafetensorSpec, ...]


@dataclass(frozen=True)
class Conversion:
    tensors: Mapping[str, TensorSource]
    steps: Sequence[ConversionStep]

    @property
    def specs(self) -> list[SafetensorSpec]:
        return [spec for step in self.steps for spec in step.outputs]

    def convert(self, report: ReportBytes = lambda _bytes: None) -> Iterator[tuple[str, Tensor]]:
        """Yield the converted tensors in the order of `specs`."""
        for step in self.steps:
            converted = step.transform([self.tensors[name].read() for name in step.sources])
            for spec, tensor in zip(step.outputs, converted, strict=True):
                yield spec.name, _require_finite(tensor.to(spec.dtype), spec.name, step.sources)
                report(spec.num_bytes)


def _require_finite(tensor: Tensor, name: str, sources: Sequence[str]) -> Tensor:
    """Return the tensor, or raise ValueError for weights that are NaN or infinite."""
    if not tensor.isfinite().all():
        count, of = int((~tensor.isfinite()).sum()), tensor.numel()
        raise ValueError(
            f"weights are not finite ({name}: {count:,} of {of:,} elements are NaN or infinite as "
            f"{str(tensor.dtype).removeprefix('torch.')}; from {format_names(list(sources))}); "
            "fetch the model again, or choose a dtype with a larger range"
        )
    return tensor


def hf_to_native(
    tensors: Mapping[str, TensorSource], config: ModelConfig, dtype: torch.dtype | None = None
) -> Conversion:
    """Convert to native tensors. Requires exactly the config's names and shapes; `dtype` none keeps the dtypes."""
    prefix = param_names.missing_prefix(tensors, config)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    mappings = [
        (mapping.hf, hf, mapping.native, native, mapping.from_hf)
        for mapping, native, hf in _mappings_with_shapes(config, stacked=param_names.has_stacked_experts(tensors))
    ]
    return _build_conversion(tensors, mappings, param_names.ignored_names(tensors, config), dtype, config)


def native_to_hf(
    tensors: Mapping[str, TensorSource], config: ModelConfig, dtype: torch.dtype | None = None
) -> Conversion:
    """Convert to tensors as published files have them."""
    mappings = [
        (mapping.native, native, mapping.hf, hf, mapping.to_hf)
        for mapping, native, hf in _mappings_with_shapes(config, stacked=False)
    ]
    return _build_conversion(tensors, mappings, {"head.weight"} if config.tied else set(), dtype, config)


def _mappings_with_shapes(
    config: ModelConfig, *, stacked: bool
) -> Iterator[tuple[ParamMapping, list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Every mapping with the native and the Hugging Face shapes, from the meta device."""
    native = models.build(config, "meta").state_dict()
    for mapping in param_names.param_mappings(config, stacked=stacked):
        tensors = [native[name] for name in mapping.native]
        yield mapping, [tuple(x.shape) for x in tensors], [tuple(x.shape) for x in mapping.to_hf(tensors)]


Shapes = Sequence[tuple[int, ...]]


def _build_conversion(
    tensors: Mapping[str, TensorSource],
    mappings: Sequence[tuple[tuple[str, ...], Shapes, tuple[str, ...], Shapes, TensorTransform]],
    ignored: set[str],
    dtype: torch.dtype | None,
    config: ModelConfig,
) -> Conversion:
    expected = {name: shape for sources, shapes, *_ in mappings for name, shape in zip(sources, shapes, strict=True)}
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys() - ignored)
    faults = {"missing": missing, "unknown": unknown, "wrong shape": wrong}
    problems = [f"{fault}: {format_names(names)}" for fault, names in faults.items() if names]
    if problems:
        raise ValueError(
            f"the weights do not match the config ({config.name}: {'; '.join(problems)}); "
            "use the config that they were saved with"
        )
    steps = []
    for sources, _, targets, shapes, transform in mappings:
        current = reduce(torch.promote_types, (tensors[name].dtype for name in sources))
        specs = (
            SafetensorSpec(name, shape, stored_dtype(name, current, dtype))
            for name, shape in zip(targets, shapes, strict=True)
        )
        steps.append(ConversionStep(sources, transform, tuple(specs)))
    return Conversion(tensors, steps)


def stored_dtype(name: str, current: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    """The dtype to store a tensor in."""
    dtype = current if requested is None else requested
    return torch.promote_types(dtype, torch.float32) if name.endswith(FP32_SUFFIXES) else dtype
