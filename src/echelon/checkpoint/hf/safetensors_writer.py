"""Writes tensors to safetensors files of a largest size, one tensor in memory at a time.

[Note: streaming]
A safetensors file starts with a header that names every tensor's type, shape and place. Shapes are known before any
value is read, so that all headers, and the index, are known too: values then follow in the order of the headers, and
nothing is held back. safetensors' own `save_file` wants a whole file's tensors in memory.
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

from echelon.checkpoint.hf.safetensors_reader import INDEX, ONE, TYPES

LARGEST = 5 * 10**9
"""bytes of a shard, where nobody says; Hugging Face's own"""

_WORDS = {dtype: word for word, dtype in TYPES.items()}


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor before its values are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def divided(specs: Iterable[Spec], largest: int) -> list[list[Spec]]:
    """In order, as many to a file as fit; a tensor that is larger has a file of its own."""
    found: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if found[-1] and size + spec.bytes > largest:
            found.append([])
            size = 0
        found[-1].append(spec)
        size += spec.bytes
    return found


def write(
    folder: Path, specs: Sequence[Spec], values: Iterable[tuple[str, Tensor]], largest: int = LARGEST
) -> list[str]:
    """Values come in the order of the specs. Gives the files' names."""
    groups = divided(specs, largest)
    names = [ONE] if len(groups) == 1 else [_shard(number, len(groups)) for number in range(len(groups))]
    stream = iter(values)
    for group, name in zip(groups, names, strict=True):
        _write_file(folder / name, group, stream)
    assert next(stream, None) is None, "more values than specs"
    if len(names) > 1:
        places = {spec.name: name for group, name in zip(groups, names, strict=True) for spec in group}
        total = sum(spec.bytes for spec in specs)
        parameters = sum(torch.Size(spec.shape).numel() for spec in specs)
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return names


def _shard(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_file(path: Path, specs: Sequence[Spec], values: Iterator[tuple[str, Tensor]]) -> None:
    """See [Note: streaming]."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for spec in specs:
        ends = [place, place + spec.bytes]
        header[spec.name] = {"dtype": _WORDS[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        place += spec.bytes
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
def appearing(folder: Path) -> Iterator[Path]:
    """A directory to write to, which takes the name `folder` if all goes well, and is gone if not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"the directory is there already, with files in it ({folder}); give another, or remove it")
    made = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
    except OSError as error:
        raise ValueError(f"the directory cannot be made ({folder}: {error.strerror}); give another") from None
    try:
        yield made
        if folder.exists():
            folder.rmdir()  # it was empty
        made.rename(folder)
    except OSError as error:
        raise ValueError(f"the directory cannot be written ({folder}: {error}); make room, or give another") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
