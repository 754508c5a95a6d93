"""Full tensors of a checkpoint, for an export, independent of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from echelon.checkpoint.checkpoint_index import CheckpointError, CheckpointIndex, TensorRecord
from echelon.checkpoint.checksums import box_checksum
from echelon.checkpoint.load import TORCH_DTYPES
from echelon.checkpoint.storage import Storage, step_dir_name
from echelon.checkpoint.tensor_slices import box_shape, numel


@dataclass(frozen=True)
class FullTensor:
    """A logical tensor on disk, read on demand."""

    storage: Storage
    step: int
    record: TensorRecord

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.record.dtype]

    def read(self) -> torch.Tensor:
        """Read the full tensor and check its checksums."""
        values = torch.empty(self.shape, dtype=self.dtype)
        for stored in self.record.slices:
            count = numel(stored.box) * self.dtype.itemsize
            data = self.storage.read(self.step, stored.file, [(stored.offset, count)])
            part = torch.frombuffer(data, dtype=self.dtype)
            if box_checksum(part, stored.box, self.shape) != stored.checksum:
                where = f"{self.storage.address}/{step_dir_name(self.step)}/{stored.file}"
                raise CheckpointError(f"the checkpoint is corrupt ({where}: bytes have changed)")
            values[tuple(slice(low, high) for low, high in stored.box)] = part.view(box_shape(stored.box))
        return values


def full_tensors(
    storage: Storage, step: int, index: CheckpointIndex, prefixes: Mapping[str, str]
) -> dict[str, FullTensor]:
    """The tensors whose names start with one of the prefixes, which is replaced by its value."""
    return {
        replacement + name.removeprefix(prefix): FullTensor(storage, step, tensor)
        for prefix, replacement in prefixes.items()
        for name, tensor in index.tensors.items()
        if name.startswith(prefix)
    }
