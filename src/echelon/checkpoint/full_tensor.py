"""Tensors of a checkpoint, whole: for an export, which is no rank's part of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from echelon.checkpoint.checkpoint_index import CheckpointError, Index, Tensor
from echelon.checkpoint.checksums import sums_of
from echelon.checkpoint.load import TORCH
from echelon.checkpoint.storage import Storage, name_of
from echelon.checkpoint.tensor_slices import extent, numel


@dataclass(frozen=True)
class Whole:
    """A logical tensor that is still on disk."""

    storage: Storage
    step: int
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH[self.tensor.dtype]

    def read(self) -> torch.Tensor:
        """All of it; what has changed on the disk is refused by name."""
        values = torch.empty(self.shape, dtype=self.dtype)
        for stored in self.tensor.slices:
            count = numel(stored.box) * self.dtype.itemsize
            part = torch.frombuffer(self.storage.read(self.step, stored.file, [(stored.at, count)]), dtype=self.dtype)
            if sums_of(part, stored.box, self.shape) != stored.sums:
                where = f"{self.storage.address}/{name_of(self.step)}/{stored.file}"
                raise CheckpointError(f"the checkpoint is damaged ({where}: bytes have changed)")
            values[tuple(slice(low, high) for low, high in stored.box)] = part.view(extent(stored.box))
        return values


def tensors_of(storage: Storage, step: int, index: Index, kinds: Mapping[str, str]) -> dict[str, Whole]:
    """Those whose names begin with one of the kinds, under what stands in its place."""
    return {
        instead + name.removeprefix(kind): Whole(storage, step, tensor)
        for kind, instead in kinds.items()
        for name, tensor in index.tensors.items()
        if name.startswith(kind)
    }
