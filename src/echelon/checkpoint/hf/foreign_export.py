"""Export of a foreign model: its weights in the Hugging Face directory that transformers itself writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.hf.convert_tensors import TensorSource
from echelon.checkpoint.hf.foreign_weights import init_from_hf_dir, write_hf_dir
from echelon.checkpoint.hf.safetensors_writer import atomic_directory
from echelon.models import init_weights
from echelon.models.foreign.causal_lm import build_causal_lm
from echelon.models.foreign.hf_source import HFSource, quiet_transformers
from echelon.models.foreign.layer_stack import own_class


@dataclass(frozen=True, kw_only=True)
class ForeignExport:
    """What an export of a model of transformers wrote."""

    directory: Path
    model_type: str
    parameters: int
    tensors: int
    num_bytes: int
    dtype: str
    files: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "directory": str(self.directory),
            "model_type": self.model_type,
            "parameters": self.parameters,
            "tensors": self.tensors,
            "bytes": self.num_bytes,
            "dtype": self.dtype,
            "files": list(self.files),
            "checked": "transformers",
            "error": 0.0,
        }

    def __str__(self) -> str:
        return (
            f"wrote {self.directory}: {self.model_type}, {self.parameters:,} parameters, {self.tensors} tensors of "
            f"{self.dtype}, {self.num_bytes:,} bytes\nread back by transformers, equal to the last bit"
        )


def export_foreign_model(
    source: HFSource,
    tensors: Mapping[str, TensorSource] | None,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> ForeignExport:
    """Write trained tensors, or those of the directory or of `seed`, and read them back through transformers."""
    with quiet_transformers():
        return _export(source, tensors, target, dtype, seed)


def _export(
    source: HFSource, tensors: Mapping[str, TensorSource] | None, target: Path, dtype: torch.dtype | None, seed: int
) -> ForeignExport:
    model = build_causal_lm(source)
    state = {name: tensor.read() for name, tensor in tensors.items()} if tensors else initial_state(model, source, seed)
    if dtype is not None:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    with atomic_directory(target) as folder:
        files = write_hf_dir(folder, model, state, source)
        _check(folder, model, state)
    floats = [value for value in state.values() if value.is_floating_point()]
    return ForeignExport(
        directory=target,
        model_type=source.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        tensors=len(state),
        num_bytes=sum(value.nbytes for value in state.values()),
        dtype=str(floats[0].dtype).removeprefix("torch."),
        files=tuple(files),
    )


def initial_state(model: Any, source: HFSource, seed: int) -> dict[str, Tensor]:
    """The weights of a directory, or those that `seed` draws where it has none, under our names."""
    kept = set(model.state_dict())
    if source.has_weights:
        init_from_hf_dir(model, source)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        state = {name: model.weight_source[name][(slice(None),) * len(shape)] for name, shape in shapes.items()}
    else:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device="cpu")
        model.tie_weights()
        init_weights(model, seed)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return state | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _check(folder: Path, model: Any, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless transformers reads every weight back as it was."""
    from echelon.checkpoint.hf.foreign_weights import merge_parts

    own = own_class(model)
    loaded, info = own.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    read = loaded.state_dict()
    expected = merge_parts(state, model.fused_parts)
    wrong = [name for name, value in expected.items() if name not in read or not _equal(read[name], value)]
    if wrong or info["missing_keys"]:
        names = [*wrong, *info["missing_keys"]]
        raise ValueError(f"transformers reads other weights than were exported ({len(names)}, such as {names[0]})")


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b.to(a.dtype)) and math.prod(a.shape) == b.numel()
