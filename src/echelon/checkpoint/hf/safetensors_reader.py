"""Tensors of a directory of safetensors files, read when they are asked for. Nothing else is ever opened.

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

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""what files of pickles are named by habit"""

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""of weights, by safetensors' names"""


@dataclass(frozen=True)
class Lazy:
    """A tensor that is still on disk."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    _source: Any = field(repr=False, compare=False)

    def __getitem__(self, part: Any) -> Tensor:
        """Reads these slices alone."""
        found: Tensor = self._source.get_slice(self.name)[part]
        return found

    def read(self) -> Tensor:
        found: Tensor = self._source.get_tensor(self.name)
        return found


class Tensors(Mapping[str, Lazy]):
    """By name. The files stay open, mapped, as long as this lives."""

    def __init__(self, found: Mapping[str, Lazy]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Lazy:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a directory: of one file, or of the files that an index names. Raises with all that is wrong."""
    # Where both are, one file goes first, as in transformers.
    where = _index(folder) if (folder / INDEX).is_file() and not (folder / ONE).is_file() else None
    if where is None and not (folder / ONE).is_file():
        raise ValueError(_nothing(folder))
    files = sorted(set(where.values())) if where is not None else [ONE]
    wrong = [
        f"a shard that the index names is missing ({folder / name})" for name in files if not _is_there(folder, name)
    ]
    found: dict[str, Lazy] = {}
    for name in files:
        if _is_there(folder, name):
            try:
                found |= _opened(folder / name)
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        raise ValueError("; also ".join(wrong) + "; fetch the model again")
    if where is not None:
        missing = sorted(name for name, file in where.items() if name not in found or found[name].file.name != file)
        extra = sorted(found.keys() - where.keys())
        both = (("not where the index says", missing), ("not in the index", extra))
        said = "; ".join(f"{what}: {listed(names)}" for what, names in both if names)
        if said:
            raise ValueError(f"the index and the files differ ({folder / INDEX}: {said}); fetch the model again")
    return Tensors(found)


def listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _is_there(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _index(folder: Path) -> dict[str, str]:
    """Names of tensors to names of files, which are in the folder itself."""
    file = folder / INDEX
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
            f"the index names what is not a safetensors file of its folder ({file}: {listed(outside)}); "
            "only safetensors are opened: save the model again with save_pretrained"
        )
    return {str(name): str(place) for name, place in found.items()}


def _opened(file: Path) -> dict[str, Lazy]:
    try:
        source: Any = safe_open(str(file), framework="pt")
        names = list(source.keys())
        facts = {name: source.get_slice(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"not a whole safetensors file ({file}: {error})") from None
    other = sorted({facts[name].get_dtype() for name in names} - TYPES.keys())
    if other:
        # Whole numbers are masks of older files, which nobody reads; packed or narrow weights must not pass as weights.
        kept = {name for name in names if facts[name].get_dtype() in TYPES}
        packed = sorted(n for n in set(names) - kept if not n.endswith((".attn.bias", ".attn.masked_bias")))
        if packed:
            raise ValueError(
                f"weights of types that are not read ({file}: {listed(packed)} as {', '.join(other)}; "
                f"read are {', '.join(TYPES)}): save the model unquantised"
            )
        names = [name for name in names if name in kept]
    return {
        name: Lazy(file, name, tuple(facts[name].get_shape()), TYPES[facts[name].get_dtype()], source) for name in names
    }


def _nothing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no such directory ({folder}); give one with config.json and model.safetensors"
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        return (
            f"the weights are pickles, which can run code when they are opened ({folder}: {listed(pickles)}); save "
            "them as safetensors where you trust them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return f"no weights were found ({folder} has neither {ONE} nor {INDEX}); give the directory of a whole model"
