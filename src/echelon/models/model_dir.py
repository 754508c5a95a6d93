"""A model that lies in a directory: what `model.json` says of it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.mla_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.models.rope_scaling import RopeScaling

MODEL_FILE = "model.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """What a directory's `model.json` holds."""

    config: ModelConfig
    """The model's shape."""
    model_type: str = ""
    """Hugging Face's name of the kind it came from; empty: it did not."""
    format: int = FORMAT_VERSION
    """Of the file."""


def is_model_dir(path: str) -> bool:
    """Whether a text is the path of such a directory."""
    return bool(path) and (Path(path) / MODEL_FILE).is_file()


def read_model_dir(folder: Path) -> SavedModel:
    file = folder / MODEL_FILE
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        if given["format"] != FORMAT_VERSION:
            raise ValueError(f"format {given['format']} is not {FORMAT_VERSION}, which is read here")
        return SavedModel(config=_parse_config(given["config"]), model_type=str(given.get("model_type", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else error
        rule, legal = f"is not a model of ours ({MODEL_FILE}: {what})", "a directory that `echelon import` made"
        raise ValidationError([ValidationIssue(key="model", value=str(folder), message=rule, legal=legal)]) from None


def _parse_config(given: dict[str, Any]) -> ModelConfig:
    unknown = sorted(given.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    values = dict(given)
    if values.get("latent") is not None:
        values["latent"] = MLAConfig(**values["latent"])
    if values.get("stretch") is not None:
        values["stretch"] = RopeScaling(**values["stretch"])
    if values.get("mixture") is not None:
        mixture = dict(values["mixture"])
        mixture["options"] = tuple((str(key), value) for key, value in mixture.get("options", ()))
        values["mixture"] = MoEConfig(**mixture)
    return ModelConfig(**values)
