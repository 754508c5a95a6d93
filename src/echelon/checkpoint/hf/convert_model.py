"""Import and export of Hugging Face models, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from echelon import models
from echelon.checkpoint.hf import convert_tensors, native_format, safetensors_reader, safetensors_writer
from echelon.checkpoint.hf.convert_tensors import ReportBytes, TensorSource
from echelon.checkpoint.hf.dequantize import open_hf_weights
from echelon.checkpoint.hf.logit_check import LogitCheck, check_logits, require_memory
from echelon.checkpoint.hf.safetensors_writer import MAX_SHARD_BYTES, SafetensorSpec, atomic_directory
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.models.hf import hf_config_reader
from echelon.models.hf.hf_config_writer import hf_config
from echelon.models.model_config import SIZES
from echelon.models.model_dir import MODEL_FILE, SavedModel, is_model_dir, read_model_dir

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEEP_DTYPE = "keep"

NativeModel = tuple[SavedModel, Mapping[str, TensorSource]]
"""a native model: its configuration, and its parameters and persistent buffers by name"""
Progress = Callable[[int], AbstractContextManager[ReportBytes]]
"""from the total bytes to a callback for the bytes of each tensor"""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What an import or export wrote."""

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
    """Convert a Hugging Face directory to a native one."""
    target_dtype = parse_dtype(dtype)
    safetensors_reader.refuse_link_outside(source / hf_config_reader.CONFIG_FILE)
    model = hf_config_reader.read_hf_config(source)
    if with_check:
        require_memory(model.config)
    conversion = convert_tensors.hf_to_native(open_hf_weights(source), model.config, target_dtype)
    specs = conversion.specs
    with atomic_directory(target) as folder:
        with progress(sum(spec.num_bytes for spec in specs)) as report:
            names = native_format.write_native_model(folder, model, specs, conversion.convert(report), max_shard_bytes)
        checked = None
        if with_check:
            written = safetensors_reader.open_safetensors(folder)
            checked = check_logits(model.config, written, source, cast_to=target_dtype)
    return _make_result(target, model, names, specs, checked)


def export_model(
    source: str | NativeModel,
    target: Path,
    *,
    dtype: str = KEEP_DTYPE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    seed: int = 0,
    progress: Progress = _no_progress,
) -> ConversionResult:
    """Convert a native directory, or a named size with initial weights, to a Hugging Face one, and check its logits."""
    target_dtype = parse_dtype(dtype)
    model, tensors = _load_native(source, seed) if isinstance(source, str) else source
    require_memory(model.config)
    conversion = convert_tensors.native_to_hf(tensors, model.config, target_dtype)
    specs = conversion.specs
    config = hf_config(model, _main_dtype(specs))
    with atomic_directory(target) as folder:
        with progress(sum(spec.num_bytes for spec in specs)) as report:
            names = safetensors_writer.write_safetensors(folder, specs, conversion.convert(report), max_shard_bytes)
        (folder / hf_config_reader.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        checked = check_logits(model.config, _cast_sources(tensors, target_dtype), folder)
    exported = SavedModel(config=model.config, model_type=str(config["model_type"]))
    return _make_result(target, exported, [hf_config_reader.CONFIG_FILE, *names], specs, checked)


def _cast_sources(tensors: Mapping[str, TensorSource], dtype: torch.dtype | None) -> Mapping[str, TensorSource]:
    """Native tensors cast to the dtypes that were written."""
    if dtype is None:
        return tensors

    def cast(source: TensorSource, stored: torch.dtype) -> TensorSource:
        return convert_tensors.ComputedTensor(source.shape, stored, lambda: source.read().to(stored))

    return {name: cast(x, convert_tensors.stored_dtype(name, x.dtype, dtype)) for name, x in tensors.items()}


def _load_native(source: str, seed: int) -> NativeModel:
    if is_model_dir(source):
        return read_model_dir(Path(source)), safetensors_reader.open_safetensors(Path(source))
    if source in SIZES:
        require_memory(SIZES[source])
        state = models.build(SIZES[source], seed=seed).state_dict()
        tensors = {name: convert_tensors.in_memory(tensor) for name, tensor in state.items()}
        return SavedModel(config=SIZES[source]), tensors
    rule = f"is neither a run, a checkpoint, a directory with {MODEL_FILE} nor a model size"
    legal = f"the directory of a run, one that `echelon import` wrote, or {', '.join(SIZES)}"
    raise _invalid("source", source, rule, legal, SIZES)


def parse_dtype(name: str) -> torch.dtype | None:
    """The dtype of a name; None to keep each tensor's own."""
    if name != KEEP_DTYPE and name not in DTYPES:
        raise _invalid("dtype", name, "is not a supported dtype", ", ".join((KEEP_DTYPE, *DTYPES)), DTYPES)
    return DTYPES.get(name)


def _invalid(key: str, value: str, message: str, legal: str, names: Iterable[str]) -> ValidationError:
    hint = did_you_mean(value, names)
    return ValidationError([ValidationIssue(key=key, value=value, message=message, legal=legal, hint=hint)])


def _main_dtype(specs: list[SafetensorSpec]) -> str:
    """The dtype of most bytes."""
    sizes = {name: sum(spec.num_bytes for spec in specs if spec.dtype == dtype) for name, dtype in DTYPES.items()}
    return max(sizes, key=lambda name: sizes[name])


def _make_result(
    target: Path, model: SavedModel, names: list[str], specs: list[SafetensorSpec], checked: LogitCheck | None
) -> ConversionResult:
    return ConversionResult(
        directory=target,
        model=model,
        files=tuple(names),
        tensors=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        dtype=_main_dtype(specs),
        check=checked,
    )
