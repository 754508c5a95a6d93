"""`model.json`: the configuration of a model that `echelon import` wrote to a directory. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from echelon.input_file import InputFileError, read_json
from echelon.layout.validation_error import ValidationError
from echelon.models.attention_config import ROPE_SCALINGS, MLAConfig, RopeScaling
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig

MODEL_FILE = "model.json"
FORMAT_VERSION = 1
MAX_NUMBER = 2**53
"""of a size, a rate or a RoPE base; also refuses NaN"""
Record = TypeVar("Record", ModelConfig, MoEConfig, MLAConfig, RopeScaling)

# Keys of the file that are older than the names of the fields.
_MOE_KEYS = {"shared": "shared_ffn", "dense": "dense_layers"}
_ROPE_KEYS = {"low": "low_freq_factor", "high": "high_freq_factor", "first": "original_max_seq_len"}
_CONFIG_KEYS = {
    "mixture": "moe",
    "latent": "mla",
    "own_head_dim": "explicit_head_dim",
    "head_norms": "qk_norm",
    "stretch": "rope_scaling",
}


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The contents of a `model.json`."""

    config: ModelConfig
    model_type: str = ""
    """Hugging Face's model_type, of an imported model."""
    format: int = FORMAT_VERSION
    """Version of the file's format."""

    def to_json(self) -> dict[str, Any]:
        written = asdict(self)
        config = _rename(written["config"], _CONFIG_KEYS, back=True)
        for key, keys in (("mixture", _MOE_KEYS), ("stretch", _ROPE_KEYS)):
            config[key] = config[key] and _rename(config[key], keys, back=True)
        if self.config.rope_scaling is not None:
            config["stretch"]["kind"] = self.config.rope_scaling.kind
        return {**written, "config": config}


def is_model_dir(path: str) -> bool:
    """Whether a directory holds a `model.json`."""
    return bool(path) and os.path.isfile(Path(path) / MODEL_FILE)


def read_model_dir(folder: Path) -> SavedModel:
    file = folder / MODEL_FILE
    try:
        given = read_json(file)
    except InputFileError as error:
        raise _invalid_dir(folder, f"{MODEL_FILE} {error.reason}") from error
    try:
        if given["format"] != FORMAT_VERSION:
            raise ValueError(f"format {given['format']} is not supported, expected {FORMAT_VERSION}")
        return SavedModel(config=_parse_config(given["config"]), model_type=str(given.get("model_type", "")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise _invalid_dir(folder, f"{MODEL_FILE}: {what}") from None


def _invalid_dir(folder: Path, what: str) -> ValidationError:
    legal = "a directory that `echelon import` wrote"
    return ValidationError.single("model", str(folder), f"is not a saved model ({what})", legal=legal)


def _parse_config(given: Mapping[str, Any]) -> ModelConfig:
    values = _rename(given, _CONFIG_KEYS)
    unknown = sorted(values.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    if values.get("mla") is not None:
        values["mla"] = _build(MLAConfig, values["mla"])
    if values.get("rope_scaling") is not None:
        scaling = _rename(values["rope_scaling"], _ROPE_KEYS)
        kind = scaling.pop("kind", "llama3")  # older files have no kind
        values["rope_scaling"] = _build(ROPE_SCALINGS[kind], scaling)
    if values.get("moe") is not None:
        moe = _rename(values["moe"], _MOE_KEYS)
        moe["options"] = tuple((str(key), value) for key, value in moe.get("options", ()))
        values["moe"] = _build(MoEConfig, moe)
    return _build(ModelConfig, values)


def _build(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """Build a dataclass whose numbers and texts have the types of its fields, and are finite."""
    types = get_type_hints(cls)
    for name, value in values.items():
        kind = types.get(name)
        if kind not in (int, float, bool, str):
            continue
        is_valid = type(value) is kind or (kind is float and type(value) is int)
        if not is_valid or (kind in (int, float) and not abs(value) <= MAX_NUMBER):
            raise ValueError(f"{name} is not a valid {kind.__name__} ({str(value)[:40]})")
    return cls(**values)


def _rename(given: Mapping[str, Any], keys: Mapping[str, str], *, back: bool = False) -> dict[str, Any]:
    """From keys of the file to names of fields, or back."""
    names = {field: key for key, field in keys.items()} if back else keys
    return {names.get(key, key): value for key, value in given.items()}
