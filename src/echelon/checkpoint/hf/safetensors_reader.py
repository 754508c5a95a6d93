"""Reads the tensors of a directory of safetensors files lazily, and opens nothing else.

A pickle can run code when it is opened, so that files of other kinds are not looked into, whatever their names say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""usual suffixes of pickles"""

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""supported dtypes, by safetensors' names"""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    _source: Any = field(repr=False, compare=False)

    def __getitem__(self, part: Any) -> Tensor:
        """Read only these slices."""
        found: Tensor = self._source.get_slice(self.name)[part]
        return found

    def read(self) -> Tensor:
        found: Tensor = self._source.get_tensor(self.name)
        return found


class LazyTensors(Mapping[str, LazyTensor]):
    """Tensors by name. The memory-mapped files stay open as long as this lives."""

    def __init__(self, found: Mapping[str, LazyTensor]) -> None:
        self._tensors = dict(found)

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_safetensors(folder: Path) -> LazyTensors:
    """Every tensor of a directory, of one file or of those in its index. Raises ValueError with all problems."""
    # One file takes precedence over an index, as in transformers.
    where = _read_index(folder) if (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file() else None
    if where is None and not (folder / SINGLE_FILE).is_file():
        raise ValueError(_missing_weights(folder))
    files = sorted(set(where.values())) if where is not None else [SINGLE_FILE]
    wrong = [
        f"a shard that the index names is missing ({folder / name})" for name in files if not _has_file(folder, name)
    ]
    found: dict[str, LazyTensor] = {}
    for name in files:
        if _has_file(folder, name):
            try:
                found |= _open_file(folder / name)
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        raise ValueError("; also ".join(wrong) + "; fetch the model again")
    if where is not None:
        missing = sorted(name for name, file in where.items() if name not in found or found[name].file.name != file)
        extra = sorted(found.keys() - where.keys())
        both = (("not where the index says", missing), ("not in the index", extra))
        differences = "; ".join(f"{what}: {format_names(names)}" for what, names in both if names)
        if differences:
            details = f"{folder / INDEX_FILE}: {differences}"
            raise ValueError(f"the index and the files differ ({details}); fetch the model again")
    return LazyTensors(found)


def format_names(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _has_file(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _read_index(folder: Path) -> dict[str, str]:
    """From names of tensors to names of files of the same directory."""
    file = folder / INDEX_FILE
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        found = given["weight_map"]
        fine = isinstance(found, dict) and all(isinstance(name, str) for name in found.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the index cannot be read ({file}: {error}); fetch the model again") from None
    if not fine or not found:
        raise ValueError(f"the index has no weight_map of names to files ({file}); fetch the model again")
    outside = sorted({name for name in found.values() if Path(name).name != name or not name.endswith(".safetensors")})
    if outside:
        raise ValueError(
            f"the index names what is not a safetensors file of its folder ({file}: {format_names(outside)}); "
            "only safetensors are opened: save the model again with save_pretrained"
        )
    return {str(name): str(place) for name, place in found.items()}


def _open_file(file: Path) -> dict[str, LazyTensor]:
    try:
        source: Any = safe_open(str(file), framework="pt")
        names = list(source.keys())
        facts = {name: source.get_slice(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"invalid safetensors file ({file}: {error})") from None
    other = sorted({facts[name].get_dtype() for name in names} - SAFETENSORS_DTYPES.keys())
    if other:
        # Integers are masks of older files, which are not read; quantised weights must not pass as weights.
        supported = {name for name in names if facts[name].get_dtype() in SAFETENSORS_DTYPES}
        packed = sorted(n for n in set(names) - supported if not n.endswith((".attn.bias", ".attn.masked_bias")))
        if packed:
            raise ValueError(
                f"weights of unsupported dtypes ({file}: {format_names(packed)} as {', '.join(other)}; "
                f"supported: {', '.join(SAFETENSORS_DTYPES)}); save the model unquantised"
            )
        names = [name for name in names if name in supported]
    return {
        name: LazyTensor(
            file, name, tuple(facts[name].get_shape()), SAFETENSORS_DTYPES[facts[name].get_dtype()], source
        )
        for name in names
    }


def _missing_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"the directory is missing ({folder}); give one with config.json and model.safetensors"
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"the weights are pickles, which can run code when opened ({folder}: {format_names(pickles)}); if you "
            "trust them, save them as safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return f"the weights are missing ({folder} has neither {SINGLE_FILE} nor {INDEX_FILE}); give a complete model"
