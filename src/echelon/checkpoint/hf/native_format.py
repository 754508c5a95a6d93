"""Our directory of an imported model: `model.json`, and its parameters under our names in safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.checkpoint.hf import safetensors_reader, safetensors_writer
from echelon.checkpoint.hf.safetensors_reader import format_names
from echelon.models.model_dir import MODEL_FILE, SavedModel

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.checkpoint.hf.safetensors_writer import SafetensorSpec
    from echelon.models.language_model import LanguageModel


def init_from_dir(model: LanguageModel, folder: Path) -> None:
    """Initialise a model on the meta device from a directory: each rank reads its slices on demand."""
    stored = safetensors_reader.open_safetensors(folder)
    state = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if model.config.tied:
        state.pop("head.weight")
    mismatched = sorted(
        name for name in state.keys() | stored.keys() if name not in stored or stored[name].shape != state.get(name)
    )
    if mismatched:
        raise ValueError(
            f"the model's parameters do not match its directory ({folder}: {format_names(mismatched)}); "
            "leave out what changes the model (tied, gate), or import it again"
        )
    model.weight_source = stored
    for path, module in model.named_modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            if f"{path}.{name}" in stored:  # small, and replicated on every rank
                setattr(module, name, stored[f"{path}.{name}"].read())


def write_native_model(
    folder: Path,
    model: SavedModel,
    specs: Sequence[SafetensorSpec],
    values: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int,
) -> list[str]:
    """Write a model into an existing directory, and return the names of the files."""
    names = safetensors_writer.write_safetensors(folder, specs, values, max_shard_bytes)
    (folder / MODEL_FILE).write_text(json.dumps(model.to_json(), indent=2) + "\n", encoding="utf-8")
    return [MODEL_FILE, *names]
