"""Writes tensors to safetensors files of a maximum size, with one tensor in memory at a time.

[Note: streaming]
A safetensors file starts with a header of every tensor's dtype, shape and offsets. Shapes are known before any value is
read, and so are all headers and the index: values are then written in the order of the headers, one by one.
safetensors' `save_file` requires all tensors of a file in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from echelon.checkpoint.hf.safetensors_reader import INDEX_FILE, SAFETENSORS_DTYPES, SINGLE_FILE

MAX_SHARD_BYTES = 5 * 10**9
"""default of Hugging Face"""

_DTYPE_NAMES = {dtype: word for word, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class SafetensorSpec:
    """Name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_into_shards(specs: Iterable[SafetensorSpec], max_shard_bytes: int) -> list[list[SafetensorSpec]]:
    """Fill shards in order; a tensor larger than a shard gets its own."""
    shards: list[list[SafetensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards


def write_safetensors(
    folder: Path,
    specs: Sequence[SafetensorSpec],
    values: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write values, which come in the order of the specs, and return the names of the files."""
    groups = split_into_shards(specs, max_shard_bytes)
    names = [SINGLE_FILE]
    if len(groups) > 1:
        names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    stream = iter(values)
    for group, name in zip(groups, names, strict=True):
        write_tensor_file(folder / name, group, stream)
    assert next(stream, None) is None, "more values than specs"
    if len(names) > 1:
        places = {spec.name: name for group, name in zip(groups, names, strict=True) for spec in group}
        total = sum(spec.num_bytes for spec in specs)
        parameters = sum(torch.Size(spec.shape).numel() for spec in specs)
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return names


def write_tensor_file(path: Path, specs: Sequence[SafetensorSpec], values: Iterator[tuple[str, Tensor]]) -> None:
    """Write one file, whose values come in the order of the specs: see [Note: streaming]."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for spec in specs:
        ends = [place, place + spec.num_bytes]
        header[spec.name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        place += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of their size
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec in specs:
            name, tensor = next(values)
            given = (name, tuple(tensor.shape), tensor.dtype)
            assert given == (spec.name, spec.shape, spec.dtype), f"{given} in place of {spec}"
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_directory(folder: Path) -> Iterator[Path]:
    """A temporary directory that becomes `folder` on success and is removed on failure."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"the directory exists and is not empty ({folder}); give another, or remove it")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise ValueError(f"the directory cannot be created ({folder}: {error.strerror}); give another") from None
    try:
        yield temporary
        if folder.exists():
            folder.rmdir()  # it was empty
        temporary.rename(folder)
    except OSError as error:
        raise ValueError(f"the directory cannot be written ({folder}: {error}); free space, or give another") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
