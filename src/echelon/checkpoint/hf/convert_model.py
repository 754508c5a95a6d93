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
from echelon.checkpoint.hf.convert_tensors import Announce, Given, Source, to_ours, to_theirs, type_of
from echelon.checkpoint.hf.logit_check import Check, check, room
from echelon.checkpoint.hf.safetensors_writer import LARGEST, Spec, appearing
from echelon.layout.validation_error import Fault, FaultError, did_you_mean
from echelon.models.hf import hf_config_reader
from echelon.models.hf.hf_config_writer import config_json
from echelon.models.model_config import SIZES
from echelon.models.model_dir import FILE, Saved, is_saved

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KEEP = "keep"

Ours = tuple[Saved, Mapping[str, Source]]
"""a model of ours: what it is, and its parameters and lasting buffers by name"""
Progress = Callable[[int], AbstractContextManager[Announce]]
"""from the bytes of all to what is told those of each"""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What was written."""

    directory: Path
    saved: Saved
    files: tuple[str, ...]
    tensors: int
    bytes: int
    dtype: str
    checked: Check | None

    def facts(self) -> dict[str, object]:
        return {
            "directory": str(self.directory),
            "model_type": self.saved.model_type,
            "parameters": self.saved.config.parameters,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "files": list(self.files),
            "checked": self.checked.against if self.checked else None,
            "error": self.checked.error if self.checked else None,
        }


def _silent(_total: int) -> AbstractContextManager[Announce]:
    return nullcontext(lambda _bytes: None)


def import_model(
    source: Path,
    target: Path,
    *,
    dtype: str = KEEP,
    largest: int = LARGEST,
    with_check: bool = False,
    progress: Progress = _silent,
) -> Carried:
    """From a directory of Hugging Face's to one of ours."""
    wanted = _dtype(dtype)
    saved = hf_config_reader.read(source)
    if with_check:
        room(saved.config)
    found = to_ours(safetensors_reader.tensors_of(source), saved.config, wanted)
    specs = found.specs
    with appearing(target) as folder:
        with progress(sum(spec.bytes for spec in specs)) as announce:
            names = native_format.write(folder, saved, specs, found.values(announce), largest)
        checked = check(saved.config, native_format.tensors_of(folder), source, rounded=wanted) if with_check else None
    return _carried(target, saved, names, specs, checked)


def export_model(
    source: str | Ours,
    target: Path,
    *,
    dtype: str = KEEP,
    largest: int = LARGEST,
    seed: int = 0,
    progress: Progress = _silent,
) -> Carried:
    """From a directory of ours, or a named size with its first values, to one of Hugging Face's that was checked."""
    wanted = _dtype(dtype)
    saved, tensors = _ours(source, seed) if isinstance(source, str) else source
    room(saved.config)
    found = to_theirs(tensors, saved.config, wanted)
    specs = found.specs
    config = config_json(saved, _word(specs))
    with appearing(target) as folder:
        with progress(sum(spec.bytes for spec in specs)) as announce:
            names = safetensors_writer.write(folder, specs, found.values(announce), largest)
        (folder / hf_config_reader.FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        checked = check(saved.config, _rounded(tensors, wanted), folder)
    kept = Saved(config=saved.config, model_type=str(config["model_type"]))
    return _carried(target, kept, [hf_config_reader.FILE, *names], specs, checked)


@dataclass(frozen=True)
class _Rounded:
    source: Source
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        return self.source.read().to(self.dtype)


def _rounded(tensors: Mapping[str, Source], dtype: torch.dtype | None) -> Mapping[str, Source]:
    """Ours as they are in what was written."""
    if dtype is None:
        return tensors
    return {name: _Rounded(x, tuple(x.shape), type_of(name, x.dtype, dtype)) for name, x in tensors.items()}


def _ours(source: str, seed: int) -> Ours:
    if is_saved(source):
        return native_format.config_of(Path(source)), native_format.tensors_of(Path(source))
    if source in SIZES:
        room(SIZES[source])
        model = models.build(SIZES[source], seed=seed)
        return Saved(config=SIZES[source]), {name: Given(tensor) for name, tensor in model.state_dict().items()}
    rule = f"is neither a run, a checkpoint, a directory with {FILE} nor the name of a model size"
    legal = f"the directory of a run, one that `echelon import` made, or {', '.join(SIZES)}"
    raise FaultError([Fault(key="source", value=source, rule=rule, legal=legal, hint=did_you_mean(source, SIZES))])


def _dtype(word: str) -> torch.dtype | None:
    if word != KEEP and word not in DTYPES:
        rule, legal = "is not a type of weights", ", ".join((KEEP, *DTYPES))
        raise FaultError([Fault(key="dtype", value=word, rule=rule, legal=legal, hint=did_you_mean(word, DTYPES))])
    return DTYPES.get(word)


def _word(specs: list[Spec]) -> str:
    """The type of most bytes."""
    held = {word: sum(spec.bytes for spec in specs if spec.dtype == dtype) for word, dtype in DTYPES.items()}
    return max(held, key=lambda word: held[word])


def _carried(target: Path, saved: Saved, names: list[str], specs: list[Spec], checked: Check | None) -> Carried:
    return Carried(
        directory=target,
        saved=saved,
        files=tuple(names),
        tensors=len(specs),
        bytes=sum(spec.bytes for spec in specs),
        dtype=_word(specs),
        checked=checked,
    )
