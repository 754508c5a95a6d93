"""A model of ours on disk: `model.json`, and its parameters by their own names in safetensors.

The one place that knows this format: import writes by `write`, export and training read by `config_of` and
`tensors_of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.checkpoint.hf import safetensors_reader, safetensors_writer
from echelon.checkpoint.hf.safetensors_reader import Lazy, listed
from echelon.models.model_dir import FILE, Saved, read

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.checkpoint.hf.safetensors_writer import Spec
    from echelon.models.language_model import LanguageModel


def config_of(folder: Path) -> Saved:
    """What the directory holds. Raises ValueError where it is not one of ours."""
    return read(folder)


def tensors_of(folder: Path) -> Mapping[str, Lazy]:
    """Parameters, and buffers that are kept, by name. A tied head is not among them: it is the embedding."""
    return safetensors_reader.tensors_of(folder)


def start_from(model: LanguageModel, folder: Path) -> None:
    """Makes a model on the meta device read its first values from a directory, slice by slice, when they are wanted."""
    found = tensors_of(folder)
    state = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if model.config.tied:
        state.pop("head.weight")
    wrong = sorted(
        name for name in state.keys() | found.keys() if name not in found or found[name].shape != state.get(name)
    )
    if wrong:
        raise ValueError(
            f"the model's parameters are not those of its directory ({folder}: {listed(wrong)}); "
            "leave out what changes the model (tied, gate), or import it again"
        )
    model.stored = found
    for path, module in model.named_modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            if f"{path}.{name}" in found:  # small, and whole on every rank
                setattr(module, name, found[f"{path}.{name}"].read())


def write(
    folder: Path, saved: Saved, specs: Sequence[Spec], values: Iterable[tuple[str, Tensor]], largest: int
) -> list[str]:
    """Into a directory that is there. Gives the names of the files."""
    names = safetensors_writer.write(folder, specs, values, largest)
    (folder / FILE).write_text(json.dumps(asdict(saved), indent=2) + "\n", encoding="utf-8")
    return [FILE, *names]
