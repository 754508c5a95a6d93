"""Loading a checkpoint on any layout: every rank reads the bytes that it holds, and no others.

[Note: what is checked, and when]

    before    index.json against its digest; names, types and shapes both ways; every file's size and header
    after     the sums of all that ranks have read (sums.py), added up over them, against those in the index

So a changed byte is noticed without reading more than what is needed. Only then is its tensor read as a whole, to name
the file. Nothing but the index and the files that it names is opened, and nothing in them can be run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from echelon.checkpoint.checkpoint_index import (
    DTYPE_BYTES,
    CheckpointError,
    CheckpointIndex,
    StoredSlice,
    abbreviate,
    parse_index,
)
from echelon.checkpoint.checksums import MASK, Checksum, add_checksums, as_int64, box_checksum, state_hash
from echelon.checkpoint.coordination import CheckpointGroup, int64_zeros, raise_on_all_ranks
from echelon.checkpoint.storage import Storage, read_index_files, step_dir_name
from echelon.checkpoint.tensor_slices import PlacedBox, box_shape, contiguous_rows, intersect, numel
from echelon.checkpoint.training_state import SAFETENSORS_DTYPES, StateItem, TrainingState
from echelon.layout.validation_error import closest_word

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class LoadResult:
    index: CheckpointIndex
    hash: str
    """of the restored state, summed up anew; that of the index"""
    bytes_read: int
    """of tensors that this rank has read"""
    bytes_held: int
    """of tensors that this rank holds, without padding"""


def find_step(storage: Storage, step: int | None = None) -> int:
    """The step of a checkpoint: the newest where none is asked for."""
    steps = storage.steps()
    if not steps:
        raise CheckpointError(f"there is no checkpoint yet ({storage.address}); train with checkpoint.every")
    if step is not None and step not in steps:
        raise CheckpointError(
            f"no checkpoint of that step (step {step}; there are {abbreviate([str(s) for s in steps])})"
        )
    return steps[-1] if step is None else step


def open_index(storage: Storage, step: int) -> CheckpointIndex:
    return parse_index(*read_index_files(storage, step), f"{storage.address}/{step_dir_name(step)}")


def load_checkpoint(state: TrainingState, storage: Storage, step: int, group: CheckpointGroup) -> LoadResult:
    """Restores a state in place. Every rank calls it; all raise if one does."""
    reader = _CheckpointReader(storage, step, group)
    reader.check_names(state)
    reader.check_files()
    return reader.restore(state)


class _CheckpointReader:
    def __init__(self, storage: Storage, step: int, together: CheckpointGroup):
        self.storage, self.step, self.group = storage, step, together
        self.where = f"{storage.address}/{step_dir_name(step)}"
        error: Exception | None = None
        try:
            self.index = open_index(storage, step)
        except (CheckpointError, KeyError, TypeError, ValueError) as found:
            error = found
        raise_on_all_ranks(together, error)
        self.tensor_order = {name: place for place, name in enumerate(sorted(self.index.tensors))}
        self.bytes_read = 0

    # -- before -------------------------------------------------------------------------------------------------------

    def check_names(self, state: TrainingState) -> None:
        """Missing, unexpected, and of another type or shape: all at once."""
        wrong: dict[str, list[str]] = {"missing": [], "different": []}
        held = int64_zeros(len(self.tensor_order))
        for item in state.items():
            tensor = self.index.tensors.get(item.name)
            if tensor is None:
                wrong["missing"].append(item.name)
                continue
            held[self.tensor_order[item.name]] = 1
            if tensor.shape != item.shape or tensor.dtype != SAFETENSORS_DTYPES[item.dtype]:
                there, here = (
                    f"{kind} {list(shape)}"
                    for kind, shape in ((tensor.dtype, tensor.shape), (SAFETENSORS_DTYPES[item.dtype], item.shape))
                )
                wrong["different"].append(f"{item.name} (there {there}, here {here})")
        self.group.all_reduce_sum(held)
        everywhere = self.group.all_gather(wrong)
        missing, different = (
            sorted({name for found in everywhere for name in found[kind]}) for kind in ("missing", "different")
        )
        unexpected = [name for name, place in self.tensor_order.items() if not held[place]]
        said: list[str] = []
        for name in missing:
            hint = closest_word(name, unexpected) if len(said) < 12 else ""
            said.append(f"missing: {name}" + (f" (is it {hint}?)" if hint else ""))
        said += [f"unexpected: {name}" for name in unexpected]
        said += [f"different: {text}" for text in different]
        if said:
            raise CheckpointError(f"the checkpoint does not fit ({self.where}); {abbreviate(said, 12)}")

    def check_files(self) -> None:
        """Every file is as long as it was, and begins as it did. Ranks share the files out."""
        error: Exception | None = None
        try:
            names = sorted(self.index.files)
            first: dict[str, int] = {}
            for stored in (stored for tensor in self.index.tensors.values() for stored in tensor.slices):
                first[stored.file] = min(first.get(stored.file, stored.offset), stored.offset)
            for name in names[self.group.rank :: self.group.size]:
                file, size = self.index.files[name], self.storage.size(self.step, name)
                if size is None:
                    raise CheckpointError(f"the checkpoint is damaged ({self.where}/{name} is missing)")
                if size != file.nbytes:
                    raise CheckpointError(
                        f"the checkpoint is damaged ({self.where}/{name} has {size:,} bytes of {file.nbytes:,})"
                    )
                header = self.storage.read(self.step, name, [(0, first.get(name, size))])
                if hashlib.sha256(header).hexdigest() != file.header_sha256:
                    raise CheckpointError(f"the checkpoint is damaged ({self.where}/{name}: its header has changed)")
        except CheckpointError as found:
            error = found
        raise_on_all_ranks(self.group, error)

    # -- reading ------------------------------------------------------------------------------------------------------

    def restore(self, state: TrainingState) -> LoadResult:
        sums = int64_zeros(len(self.tensor_order), 2)
        held = 0
        error: Exception | None = None
        try:
            for item in state.items(restoring=True):
                values = self._read_item(item)
                held += sum(numel(placed.box) for placed in item.boxes()) * item.dtype.itemsize
                if item.is_writer:
                    found = add_checksums([_item_checksum(values, placed, item) for placed in item.boxes()])
                    sums[self.tensor_order[item.name]] += torch.tensor([as_int64(word) for word in found])
                item.write(values)
        except CheckpointError as found:
            error = found
        raise_on_all_ranks(self.group, error)
        self.group.all_reduce_sum(sums)
        restored = {
            name: (int(sums[place, 0]) & MASK, int(sums[place, 1]) & MASK) for name, place in self.tensor_order.items()
        }
        self._compare_checksums(restored)
        return LoadResult(self.index, state_hash(restored), self.bytes_read, held)

    def _read_item(self, item: StateItem) -> torch.Tensor:
        """What the rank holds of a tensor, flat, with padding 0."""
        values = torch.zeros(item.size, dtype=item.dtype)
        for placed in item.boxes():
            for stored, shared in self._overlapping_slices(item.name, placed):
                target = placed.sub_box(shared)
                shape = box_shape(shared)
                values.as_strided(shape, target.strides, target.offset).copy_(
                    self._read(item.name, stored, shared).view(shape)
                )
        return values

    def _overlapping_slices(
        self, name: str, placed: PlacedBox
    ) -> Iterator[tuple[StoredSlice, tuple[tuple[int, int], ...]]]:
        for stored in self.index.tensors[name].slices:
            shared = intersect(stored.box, placed.box)
            if shared is not None:
                yield stored, shared

    def _read(self, name: str, stored: StoredSlice, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        kind = self.index.tensors[name].dtype
        rows, size = contiguous_rows(box, stored.box), DTYPE_BYTES[kind]
        ranges = [(stored.offset + start * size, rows.length * size) for start in rows.starts]
        found = self.storage.read(self.step, stored.file, ranges)
        self.bytes_read += len(found)
        return torch.frombuffer(found, dtype=TORCH_DTYPES[kind])

    # -- after --------------------------------------------------------------------------------------------------------

    def _compare_checksums(self, restored: Mapping[str, Checksum]) -> None:
        wrong = [
            name
            for name, tensor in self.index.tensors.items()
            if add_checksums([stored.checksum for stored in tensor.slices]) != restored[name]
        ]
        if not wrong:
            return
        files = (
            sorted({file for name in wrong for file in self._damaged_files(name)}) if self.group.is_rank_zero else []
        )
        files = self.group.broadcast(files)
        what = ", ".join(f"{self.where}/{file}" for file in files) or f"{self.where} was changed while it was read"
        raise CheckpointError(f"the checkpoint is damaged ({what}: bytes of {abbreviate(wrong, 4)} have changed)")

    def _damaged_files(self, name: str) -> Iterator[str]:
        tensor = self.index.tensors[name]
        for stored in tensor.slices:
            if box_checksum(self._read(name, stored, stored.box), stored.box, tensor.shape) != stored.checksum:
                yield stored.file


def _item_checksum(values: torch.Tensor, placed: PlacedBox, item: StateItem) -> Checksum:
    box = values.as_strided(box_shape(placed.box), placed.strides, placed.offset)
    return box_checksum(box.contiguous(), placed.box, item.shape)
