"""Import and export: the order of the steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from echelon import models
from echelon.checkpoint.hf import native_format, safetensors_reader, safetensors_writer
from echelon.checkpoint.hf.convert_tensors import (
    InMemoryTensor,
    ReportBytes,
    TensorSource,
    hf_to_native,
    native_to_hf,
    stored_dtype,
)
from echelon.checkpoint.hf.logit_check import LogitCheck, check_logits, require_memory
from echelon.checkpoint.hf.safetensors_writer import MAX_SHARD_BYTES, SafetensorSpec, atomic_directory
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.models.hf import hf_config_reader
from echelon.models.hf.hf_config_writer import hf_config
from echelon.models.model_config import SIZES
from echelon.models.model_dir import MODEL_FILE, SavedModel, is_model_dir, read_model_dir

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KEEP_DTYPE = "keep"

NativeModel = tuple[SavedModel, Mapping[str, TensorSource]]
"""a model of ours: what it is, and its parameters and lasting buffers by name"""
Progress = Callable[[int], AbstractContextManager[ReportBytes]]
"""from the bytes of all to what is told those of each"""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What was written."""

    directory: Path
    model: SavedModel
    files: tuple[str, ...]
    tensors: int
    num_bytes: int
    dtype: str
    check: LogitCheck | None

    def to_json(self) -> dict[str, object]:
        return {
            "directory": str(self.directory),
            "model_type": self.model.model_type,
            "parameters": self.model.config.parameters,
            "tensors": self.tensors,
            "bytes": self.num_bytes,
            "dtype": self.dtype,
            "files": list(self.files),
            "checked": self.check.against if self.check else None,
            "error": self.check.error if self.check else None,
        }


def _no_progress(_total: int) -> AbstractContextManager[ReportBytes]:
    return nullcontext(lambda _bytes: None)


def import_model(
    source: Path,
    target: Path,
    *,
    dtype: str = KEEP_DTYPE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    with_check: bool = False,
    progress: Progress = _no_progress,
) -> ConversionResult:
    """From a directory of Hugging Face's to one of ours."""
    wanted = _parse_dtype(dtype)
    saved = hf_config_reader.read_hf_config(source)
    if with_check:
        require_memory(saved.config)
    found = hf_to_native(safetensors_reader.open_safetensors(source), saved.config, wanted)
    specs = found.specs
    with atomic_directory(target) as folder:
        with progress(sum(spec.num_bytes for spec in specs)) as announce:
            names = native_format.write_native_model(folder, saved, specs, found.convert(announce), max_shard_bytes)
        checked = (
            check_logits(saved.config, safetensors_reader.open_safetensors(folder), source, cast_to=wanted)
            if with_check
            else None
        )
    return _make_result(target, saved, names, specs, checked)


def export_model(
    source: str | NativeModel,
    target: Path,
    *,
    dtype: str = KEEP_DTYPE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    seed: int = 0,
    progress: Progress = _no_progress,
) -> ConversionResult:
    """From a directory of ours, or a named size with its first values, to one of Hugging Face's that was checked."""
    wanted = _parse_dtype(dtype)
    saved, tensors = _load_native(source, seed) if isinstance(source, str) else source
    require_memory(saved.config)
    found = native_to_hf(tensors, saved.config, wanted)
    specs = found.specs
    config = hf_config(saved, _main_dtype(specs))
    with atomic_directory(target) as folder:
        with progress(sum(spec.num_bytes for spec in specs)) as announce:
            names = safetensors_writer.write_safetensors(folder, specs, found.convert(announce), max_shard_bytes)
        (folder / hf_config_reader.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        checked = check_logits(saved.config, _cast_sources(tensors, wanted), folder)
    kept = SavedModel(config=saved.config, model_type=str(config["model_type"]))
    return _make_result(target, kept, [hf_config_reader.CONFIG_FILE, *names], specs, checked)


@dataclass(frozen=True)
class _CastSource:
    source: TensorSource
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        return self.source.read().to(self.dtype)


def _cast_sources(tensors: Mapping[str, TensorSource], dtype: torch.dtype | None) -> Mapping[str, TensorSource]:
    """Ours as they are in what was written."""
    if dtype is None:
        return tensors
    return {name: _CastSource(x, tuple(x.shape), stored_dtype(name, x.dtype, dtype)) for name, x in tensors.items()}


def _load_native(source: str, seed: int) -> NativeModel:
    if is_model_dir(source):
        return read_model_dir(Path(source)), safetensors_reader.open_safetensors(Path(source))
    if source in SIZES:
        require_memory(SIZES[source])
        model = models.build(SIZES[source], seed=seed)
        return SavedModel(config=SIZES[source]), {
            name: InMemoryTensor(tensor) for name, tensor in model.state_dict().items()
        }
    rule = f"is neither a run, a checkpoint, a directory with {MODEL_FILE} nor the name of a model size"
    legal = f"the directory of a run, one that `echelon import` made, or {', '.join(SIZES)}"
    raise ValidationError(
        [ValidationIssue(key="source", value=source, message=rule, legal=legal, hint=did_you_mean(source, SIZES))]
    )


def _parse_dtype(word: str) -> torch.dtype | None:
    if word != KEEP_DTYPE and word not in DTYPES:
        rule, legal = "is not a type of weights", ", ".join((KEEP_DTYPE, *DTYPES))
        raise ValidationError(
            [ValidationIssue(key="dtype", value=word, message=rule, legal=legal, hint=did_you_mean(word, DTYPES))]
        )
    return DTYPES.get(word)


def _main_dtype(specs: list[SafetensorSpec]) -> str:
    """The type of most bytes."""
    held = {word: sum(spec.num_bytes for spec in specs if spec.dtype == dtype) for word, dtype in DTYPES.items()}
    return max(held, key=lambda word: held[word])


def _make_result(
    target: Path, saved: SavedModel, names: list[str], specs: list[SafetensorSpec], checked: LogitCheck | None
) -> ConversionResult:
    return ConversionResult(
        directory=target,
        model=saved,
        files=tuple(names),
        tensors=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        dtype=_main_dtype(specs),
        check=checked,
    )
