"""What a run has learnt: the weights of one of its checkpoints, as a model that can be exported.

Tensors are read one by one, from whatever boxes the ranks wrote, and compared with their check sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from echelon.checkpoint.index import BYTES, CheckpointError, Index
from echelon.checkpoint.reading import TORCH, find, open_index
from echelon.checkpoint.slices import extent, numel
from echelon.checkpoint.storage import Storage, name_of, storage_of
from echelon.checkpoint.sums import sums_of
from echelon.models import own
from echelon.models.saved import Saved, is_saved, read
from echelon.train.resume import FOLDER, where
from echelon.train.run import Run
from echelon.train.task import shape_of

KINDS = ("model.", "buffer.")
"""of a checkpoint's names, what belongs to the model"""


@dataclass(frozen=True)
class Weight:
    """A logical tensor of a checkpoint, still on disk."""

    storage: Storage
    index: Index
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.tensors[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH[self.index.tensors[self.name].dtype]

    def read(self) -> Tensor:
        tensor, step = self.index.tensors[self.name], self.index.step
        found = torch.empty(tensor.shape, dtype=self.dtype)
        for stored in tensor.slices:
            count = numel(stored.box) * BYTES[tensor.dtype]
            box = torch.frombuffer(self.storage.read(step, stored.file, [(stored.at, count)]), dtype=self.dtype)
            if sums_of(box, stored.box, tensor.shape) != stored.sums:
                file = f"{self.storage.address}/{name_of(step)}/{stored.file}"
                raise CheckpointError(f"the checkpoint is damaged ({file}: bytes of {self.name} have changed)")
            found[tuple(slice(low, high) for low, high in stored.box)] = box.view(extent(stored.box))
        return found


def is_run(source: str) -> bool:
    """Whether a text is the path of a run's directory, or of one of its checkpoints."""
    return (where(source)[0] / "config.toml").is_file()


def learnt(source: str) -> tuple[Saved, Mapping[str, Weight]]:
    """Of a run's newest checkpoint, or of the one that is named."""
    path, step = where(source)
    config = Run.open(path).config
    if own.is_own(config.model):
        raise ValueError(f"a module of your own has no name in transformers ({path}: model={config.model})")
    storage = storage_of(config.checkpoint.path or str(path / FOLDER))
    index = open_index(storage, find(storage, step))
    index.check()
    came_from = read(Path(config.model)).model_type if is_saved(config.model) else ""
    tensors = {name.partition(".")[2]: Weight(storage, index, name) for name in index.tensors if name.startswith(KINDS)}
    return Saved(config=shape_of(config), model_type=came_from), tensors
