"""A model that lies in a directory: what `model.json` says of it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from echelon.layout.validation_error import Fault, FaultError
from echelon.models.mla_config import LatentConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MixtureConfig
from echelon.models.rope_scaling import Stretch

FILE = "model.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a directory's `model.json` holds."""

    config: ModelConfig
    """The model's shape."""
    model_type: str = ""
    """Hugging Face's name of the kind it came from; empty: it did not."""
    format: int = FORMAT
    """Of the file."""


def is_saved(text: str) -> bool:
    """Whether a text is the path of such a directory."""
    return bool(text) and (Path(text) / FILE).is_file()


def read(folder: Path) -> Saved:
    file = folder / FILE
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']} is not {FORMAT}, which is read here")
        return Saved(config=_config(given["config"]), model_type=str(given.get("model_type", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else error
        rule, legal = f"is not a model of ours ({FILE}: {what})", "a directory that `echelon import` made"
        raise FaultError([Fault(key="model", value=str(folder), rule=rule, legal=legal)]) from None


def _config(given: dict[str, Any]) -> ModelConfig:
    unknown = sorted(given.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    values = dict(given)
    if values.get("latent") is not None:
        values["latent"] = LatentConfig(**values["latent"])
    if values.get("stretch") is not None:
        values["stretch"] = Stretch(**values["stretch"])
    if values.get("mixture") is not None:
        mixture = dict(values["mixture"])
        mixture["options"] = tuple((str(key), value) for key, value in mixture.get("options", ()))
        values["mixture"] = MixtureConfig(**mixture)
    return ModelConfig(**values)
