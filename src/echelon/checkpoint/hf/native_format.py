"""A model of ours on disk: `model.json`, and its parameters by their own names in safetensors.

The one place that knows this format: import writes by `write`, export and training read by `config_of` and
`tensors_of`.
"""

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
    """Makes a model on the meta device read its first values from a directory, slice by slice, when they are wanted."""
    found = safetensors_reader.open_safetensors(folder)
    state = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if model.config.tied:
        state.pop("head.weight")
    wrong = sorted(
        name for name in state.keys() | found.keys() if name not in found or found[name].shape != state.get(name)
    )
    if wrong:
        raise ValueError(
            f"the model's parameters are not those of its directory ({folder}: {format_names(wrong)}); "
            "leave out what changes the model (tied, gate), or import it again"
        )
    model.weight_source = found
    for path, module in model.named_modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            if f"{path}.{name}" in found:  # small, and whole on every rank
                setattr(module, name, found[f"{path}.{name}"].read())


def write_native_model(
    folder: Path,
    model: SavedModel,
    specs: Sequence[SafetensorSpec],
    values: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int,
) -> list[str]:
    """Into a directory that is there. Gives the names of the files."""
    names = safetensors_writer.write_safetensors(folder, specs, values, max_shard_bytes)
    (folder / MODEL_FILE).write_text(json.dumps(model.to_json(), indent=2) + "\n", encoding="utf-8")
    return [MODEL_FILE, *names]
