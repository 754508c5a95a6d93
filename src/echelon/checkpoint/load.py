"""Loading a checkpoint on any layout: every rank reads the bytes of its own slices, and no others.

This is how a checkpoint is resharded: the stored slices of one layout are intersected with those of another.

[Note: what is checked, and when]

    before    index.json against its digest; names, dtypes and shapes both ways; every file's size and header
    after     the checksums of what all ranks have read (checksums.py), summed over ranks, against those in the index

So a changed byte is detected without reading more than needed. Only then is the full tensor read, to name the file.
Only the index and the files that it names are opened, and nothing in them can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from echelon.checkpoint import checkpoint_index
from echelon.checkpoint.checkpoint_index import CheckpointError, CheckpointIndex, StoredSlice, abbreviate
from echelon.checkpoint.checksums import MASK, Checksum, add_checksums, as_int64, box_checksum, state_hash
from echelon.checkpoint.coordination import CheckpointGroup, errors_on_all_ranks, int64_zeros
from echelon.checkpoint.storage import Storage, read_index_files, step_dir_name
from echelon.checkpoint.tensor_slices import Box, PlacedBox, box_shape, contiguous_rows, intersect, numel
from echelon.checkpoint.training_state import SAFETENSORS_DTYPES, StateItem, TrainingState
from echelon.layout.validation_error import closest_word

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class LoadResult:
    """What was restored."""

    index: CheckpointIndex
    hash: str
    """of the restored state, computed from what was read; equal to that of the index"""
    bytes_read: int
    """of tensors, by this rank"""
    bytes_held: int
    """of the tensors that this rank holds, without padding"""
    note: str = ""
    """what the user should know of it"""


def find_step(storage: Storage, step: int | None = None) -> int:
    """The requested step if it has a checkpoint, by default the newest."""
    steps = storage.steps()
    if not steps:
        raise CheckpointError(f"no checkpoint found ({storage.address}); train with checkpoint.every")
    if step is not None and step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} (available: {abbreviate([str(s) for s in steps])})")
    return steps[-1] if step is None else step


def open_index(storage: Storage, step: int) -> CheckpointIndex:
    where = f"{storage.address}/{step_dir_name(step)}"
    index = checkpoint_index.parse_index(*read_index_files(storage, step), where)
    if index.step != step:
        raise CheckpointError(f"the checkpoint is of another step ({where}: step {index.step}); use another checkpoint")
    return index


def load_checkpoint(state: TrainingState, storage: Storage, step: int, group: CheckpointGroup) -> LoadResult:
    """Restore a state in place, on every rank; all ranks raise if one does."""
    reader = _CheckpointReader(storage, step, group)
    reader.check_names(state)
    reader.check_files()
    return reader.restore(state)


class _CheckpointReader:
    def __init__(self, storage: Storage, step: int, group: CheckpointGroup):
        self.storage, self.step, self.group = storage, step, group
        self.where = f"{storage.address}/{step_dir_name(step)}"
        with errors_on_all_ranks(group):
            self.index = open_index(storage, step)
        self.tensor_order = {name: index for index, name in enumerate(sorted(self.index.tensors))}
        self.bytes_read = 0

    # -- checks before reading ----------------------------------------------------------------------------------------

    def check_names(self, state: TrainingState) -> None:
        """Report all tensors that are missing, unexpected, or of another dtype or shape."""
        wrong: dict[str, list[str]] = {"missing": [], "different": []}
        in_model = int64_zeros(len(self.tensor_order))
        for item in state.items():
            tensor = self.index.tensors.get(item.name)
            if tensor is None:
                wrong["missing"].append(item.name)
                continue
            in_model[self.tensor_order[item.name]] = 1
            stored = f"{tensor.dtype} {list(tensor.shape)}"
            expected = f"{SAFETENSORS_DTYPES[item.dtype]} {list(item.shape)}"
            if stored != expected:
                wrong["different"].append(f"{item.name} (checkpoint {stored}, model {expected})")
        self.group.all_reduce_sum(in_model)
        of_ranks = self.group.all_gather(wrong)
        missing, different = (sorted({name for rank in of_ranks for name in rank[problem]}) for problem in wrong)
        unexpected = [name for name, index in self.tensor_order.items() if not in_model[index]]
        problems: list[str] = []
        for name in missing:
            hint = closest_word(name, unexpected) if len(problems) < 12 else ""
            problems.append(f"missing: {name}" + (f" (did you mean {hint}?)" if hint else ""))
        problems += [f"unexpected: {name}" for name in unexpected]
        problems += [f"different: {text}" for text in different]
        if problems:
            raise CheckpointError(f"the checkpoint does not match the model ({self.where}); {abbreviate(problems, 12)}")

    def check_files(self) -> None:
        """Check every file's size and header; each rank checks some of the files."""
        header_bytes: dict[str, int] = {}
        for stored in (stored for tensor in self.index.tensors.values() for stored in tensor.slices):
            header_bytes[stored.file] = min(header_bytes.get(stored.file, stored.offset), stored.offset)
        with errors_on_all_ranks(self.group):
            for name in sorted(self.index.files)[self.group.rank :: self.group.size]:
                file, size = self.index.files[name], self.storage.size(self.step, name)
                if size is None:
                    raise CheckpointError(f"the checkpoint is corrupt ({self.where}/{name} is missing)")
                if size != file.nbytes:
                    raise CheckpointError(
                        f"the checkpoint is corrupt ({self.where}/{name} has {size:,} bytes of {file.nbytes:,})"
                    )
                header = self.storage.read(self.step, name, [(0, header_bytes.get(name, size))])
                if hashlib.sha256(header).hexdigest() != file.header_sha256:
                    raise CheckpointError(f"the checkpoint is corrupt ({self.where}/{name}: its header has changed)")

    # -- reading ------------------------------------------------------------------------------------------------------

    def restore(self, state: TrainingState) -> LoadResult:
        sums = int64_zeros(len(self.tensor_order), 2)
        bytes_held = 0
        with errors_on_all_ranks(self.group):
            for item in state.items(restoring=True):
                values = self._read_item(item)
                bytes_held += sum(numel(placed.box) for placed in item.boxes()) * item.dtype.itemsize
                if item.is_writer:
                    checksum = item_checksum(values, item)
                    sums[self.tensor_order[item.name]] += torch.tensor([as_int64(word) for word in checksum])
                item.write(values)
        rows = self.group.all_reduce_sum(sums).tolist()
        restored = {name: (a & MASK, b & MASK) for name, (a, b) in zip(self.tensor_order, rows, strict=True)}
        self._compare_checksums(restored)
        return LoadResult(self.index, state_hash(restored), self.bytes_read, bytes_held)

    def _read_item(self, item: StateItem) -> torch.Tensor:
        """The rank's slice of a tensor, flat, with zeros as padding."""
        values = torch.zeros(item.size, dtype=item.dtype)
        for placed in item.boxes():
            for stored in self.index.tensors[item.name].slices:
                if (shared := intersect(stored.box, placed.box)) is not None:
                    target, shape = placed.sub_box(shared), box_shape(shared)
                    part = self._read(item.name, stored, shared).view(shape)
                    values.as_strided(shape, target.strides, target.offset).copy_(part)
        return values

    def _read(self, name: str, stored: StoredSlice, box: Box) -> torch.Tensor:
        dtype = self.index.tensors[name].dtype
        rows, size = contiguous_rows(box, stored.box), checkpoint_index.DTYPE_BYTES[dtype]
        ranges = [(stored.offset + start * size, rows.length * size) for start in rows.starts]
        data = self.storage.read(self.step, stored.file, ranges)
        self.bytes_read += len(data)
        return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])

    # -- checks after reading -----------------------------------------------------------------------------------------

    def _compare_checksums(self, restored: Mapping[str, Checksum]) -> None:
        slices = {name: tensor.slices for name, tensor in self.index.tensors.items()}
        stored = {name: add_checksums([part.checksum for part in parts]) for name, parts in slices.items()}
        wrong = [name for name, checksum in stored.items() if checksum != restored[name]]
        if not wrong:
            return
        files: list[str] = []
        if self.group.is_rank_zero:
            files = sorted({file for name in wrong for file in self._damaged_files(name)})
        files = self.group.broadcast(files)
        where = ", ".join(f"{self.where}/{file}" for file in files) or f"{self.where} was changed while it was read"
        raise CheckpointError(f"the checkpoint is corrupt ({where}: bytes of {abbreviate(wrong, 4)} have changed)")

    def _damaged_files(self, name: str) -> Iterator[str]:
        tensor = self.index.tensors[name]
        for stored in tensor.slices:
            if box_checksum(self._read(name, stored, stored.box), stored.box, tensor.shape) != stored.checksum:
                yield stored.file


def item_checksum(values: torch.Tensor, item: StateItem) -> Checksum:
    """The checksum of a rank's slice of a tensor, given its elements on the CPU."""

    def of_box(placed: PlacedBox) -> Checksum:
        start = values.storage_offset() + placed.offset
        box = values.as_strided(box_shape(placed.box), placed.strides, start)
        return box_checksum(box.contiguous(), placed.box, item.shape)

    return add_checksums([of_box(placed) for placed in item.boxes()])
