"""Reads the tensors of a directory of safetensors files lazily, and opens nothing else.

A pickle can run code when it is opened, so that files of other kinds are not looked into, whatever their names say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echelon.input_file import MIB, InputFileError, plain_name, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 * MIB
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""usual suffixes of pickles"""

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""supported dtypes, by safetensors' names"""
QUANTISED_DTYPES = {"F8_E4M3": torch.float8_e4m3fn}
"""dtypes that are no weights without their scales (dequantize.py)"""
INTEGER_DTYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
"""dtypes of tables that a class has itself"""


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
        values: Tensor = self._source.get_slice(self.name)[part]
        return values

    def read(self) -> Tensor:
        values: Tensor = self._source.get_tensor(self.name)
        return values


def open_safetensors(folder: Path, *, quantised: bool = False, integers: bool = False) -> dict[str, LazyTensor]:
    """Every tensor of a directory by name, of one file or of those in its index. Raises ValueError with all problems.

    With `quantised` tensors of `QUANTISED_DTYPES` are opened too, and with `integers` those of `INTEGER_DTYPES`;
    otherwise they are refused.
    The memory-mapped files stay open as long as a tensor of them lives.
    """
    # One file takes precedence over an index, as in transformers.
    weight_map: dict[str, str] | None = None
    if not (folder / SINGLE_FILE).is_file():
        if not (folder / INDEX_FILE).is_file():
            raise ValueError(_missing_weights(folder))
        weight_map = _read_index(folder)
    files = [folder / name for name in ([SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values())))]
    faults = [f"a shard that the index names is missing ({file})" for file in files if not file.is_file()]
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        if file.is_file():
            try:
                refuse_link_outside(file)
                more = (QUANTISED_DTYPES if quantised else {}) | (INTEGER_DTYPES if integers else {})
                shard = _open_file(file, SAFETENSORS_DTYPES | more)
            except ValueError as error:
                faults.append(str(error))
                continue
            if twice := sorted(tensors.keys() & shard.keys()):
                files_of_both = f"{file} and {tensors[twice[0]].file.name}"
                faults.append(f"tensors are stored twice ({files_of_both}: {format_names(twice)})")
            tensors |= shard
    if faults:
        raise ValueError("; also ".join(faults) + "; fetch the model again")
    if weight_map is not None:
        missing = sorted(
            name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file
        )
        extra = sorted(tensors.keys() - weight_map.keys())
        both = (("not where the index says", missing), ("not in the index", extra))
        differences = "; ".join(f"{what}: {format_names(names)}" for what, names in both if names)
        if differences:
            details = f"{folder / INDEX_FILE}: {differences}"
            raise ValueError(f"the index and the files differ ({details}); fetch the model again")
    return tensors


def open_tensor_file(file: Path) -> dict[str, LazyTensor]:
    """Every tensor of one safetensors file by name."""
    refuse_link_outside(file)
    return _open_file(file, SAFETENSORS_DTYPES)


def format_names(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _read_index(folder: Path) -> dict[str, str]:
    """From names of tensors to names of files of the same directory."""
    file = folder / INDEX_FILE
    refuse_link_outside(file)
    try:
        index = read_json(file, max_bytes=MAX_INDEX_BYTES)
    except InputFileError as error:
        raise ValueError(f"the index {error}; fetch the model again") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values())):
        raise ValueError(f"the index has no weight_map of names to files ({file}); fetch the model again")
    names = set(weight_map.values())
    outside = sorted(name for name in names if not plain_name(name) or not name.endswith(".safetensors"))
    if outside:
        raise ValueError(
            f"the index names what is not a safetensors file of its folder ({file}: {format_names(outside)}); "
            "only safetensors are opened: save the model again with save_pretrained"
        )
    return {str(name): str(shard) for name, shard in weight_map.items()}


def refuse_link_outside(file: Path) -> None:
    """Raise ValueError for a symbolic link to a file outside of its directory.

    The links of Hugging Face's cache are allowed: snapshots/REVISION/NAME points to blobs/HASH of the same model.
    """
    folder, target = file.parent.resolve(), file.resolve()
    allowed = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if file.is_symlink() and not any(target.is_relative_to(parent) for parent in allowed):
        raise ValueError(f"a link leads out of the model's directory ({file} -> {target}); copy the file into it")


def _open_file(file: Path, supported: Mapping[str, torch.dtype]) -> dict[str, LazyTensor]:
    try:
        source: Any = safe_open(str(file), framework="pt")
        names = list(source.keys())
        slices = {name: source.get_slice(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"invalid safetensors file ({file}: {error})") from None
    dtypes = {name: part.get_dtype() for name, part in slices.items()}
    unsupported = {name: dtype for name, dtype in dtypes.items() if dtype not in supported}
    # Integers are masks of older files, which are not read; quantised weights must not pass as weights.
    packed = sorted(name for name in unsupported if not name.endswith((".attn.bias", ".attn.masked_bias")))
    if packed:
        raise ValueError(
            f"weights of unsupported dtypes ({file}: {format_names(packed)} as "
            f"{', '.join(sorted(set(unsupported.values())))}; supported: {', '.join(supported)}); "
            "save the model unquantised"
        )
    return {
        name: LazyTensor(file, name, tuple(part.get_shape()), supported[dtypes[name]], source)
        for name, part in slices.items()
        if name not in unsupported
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
