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

from echelon.models.saved import FILE, Saved, read

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.checkpoint.hugging_face.files import Lazy
    from echelon.checkpoint.hugging_face.shards import Spec


def config_of(folder: Path) -> Saved:
    """What the directory holds. Raises ValueError where it is not one of ours."""
    return read(folder)


def tensors_of(folder: Path) -> Mapping[str, Lazy]:
    """Parameters, and buffers that are kept, by name. A tied head is not among them: it is the embedding."""
    from echelon.checkpoint.hugging_face import files

    return files.tensors_of(folder)


def write(
    folder: Path, saved: Saved, specs: Sequence[Spec], values: Iterable[tuple[str, Tensor]], largest: int
) -> list[str]:
    """Into a directory that is there. Gives the names of the files."""
    from echelon.checkpoint.hugging_face import shards

    names = shards.write(folder, specs, values, largest)
    (folder / FILE).write_text(json.dumps(asdict(saved), indent=2) + "\n", encoding="utf-8")
    return [FILE, *names]
