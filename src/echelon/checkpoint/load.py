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

from echelon.checkpoint.checkpoint_index import BYTES, CheckpointError, Index, Stored, few, read_index
from echelon.checkpoint.checksums import MASK, Sums, added, hash_of, signed, sums_of
from echelon.checkpoint.coordination import Together, agree, zeros
from echelon.checkpoint.storage import Storage, index_files, name_of
from echelon.checkpoint.tensor_slices import Placed, common, extent, numel, rows_of
from echelon.checkpoint.training_state import TYPES, Item, State
from echelon.layout.validation_error import closest

TORCH = {name: dtype for dtype, name in TYPES.items()}


@dataclass(frozen=True)
class Loaded:
    index: Index
    hash: str
    """of the restored state, summed up anew; that of the index"""
    nbytes: int
    """of tensors that this rank has read"""
    held: int
    """of tensors that this rank holds, without padding"""


def find(storage: Storage, step: int | None = None) -> int:
    """The step of a checkpoint: the newest where none is asked for."""
    steps = storage.steps()
    if not steps:
        raise CheckpointError(f"there is no checkpoint yet ({storage.address}); train with checkpoint.every")
    if step is not None and step not in steps:
        raise CheckpointError(f"no checkpoint of that step (step {step}; there are {few([str(s) for s in steps])})")
    return steps[-1] if step is None else step


def open_index(storage: Storage, step: int) -> Index:
    return read_index(*index_files(storage, step), f"{storage.address}/{name_of(step)}")


def load(state: State, storage: Storage, step: int, together: Together) -> Loaded:
    """Restores a state in place. Every rank calls it; all raise if one does."""
    reader = _Reader(storage, step, together)
    reader.check_names(state)
    reader.check_files()
    return reader.restore(state)


class _Reader:
    def __init__(self, storage: Storage, step: int, together: Together):
        self.storage, self.step, self.together = storage, step, together
        self.where = f"{storage.address}/{name_of(step)}"
        error: Exception | None = None
        try:
            self.index = open_index(storage, step)
        except (CheckpointError, KeyError, TypeError, ValueError) as found:
            error = found
        agree(together, error)
        self.order = {name: place for place, name in enumerate(sorted(self.index.tensors))}
        self.nbytes = 0

    # -- before -------------------------------------------------------------------------------------------------------

    def check_names(self, state: State) -> None:
        """Missing, unexpected, and of another type or shape: all at once."""
        wrong: dict[str, list[str]] = {"missing": [], "different": []}
        held = zeros(len(self.order))
        for item in state.items():
            tensor = self.index.tensors.get(item.name)
            if tensor is None:
                wrong["missing"].append(item.name)
                continue
            held[self.order[item.name]] = 1
            if tensor.shape != item.shape or tensor.dtype != TYPES[item.dtype]:
                there, here = (
                    f"{kind} {list(shape)}"
                    for kind, shape in ((tensor.dtype, tensor.shape), (TYPES[item.dtype], item.shape))
                )
                wrong["different"].append(f"{item.name} (there {there}, here {here})")
        self.together.add_up(held)
        everywhere = self.together.all_told(wrong)
        missing, different = (
            sorted({name for found in everywhere for name in found[kind]}) for kind in ("missing", "different")
        )
        unexpected = [name for name, place in self.order.items() if not held[place]]
        said: list[str] = []
        for name in missing:
            hint = closest(name, unexpected) if len(said) < 12 else ""
            said.append(f"missing: {name}" + (f" (is it {hint}?)" if hint else ""))
        said += [f"unexpected: {name}" for name in unexpected]
        said += [f"different: {text}" for text in different]
        if said:
            raise CheckpointError(f"the checkpoint does not fit ({self.where}); {few(said, 12)}")

    def check_files(self) -> None:
        """Every file is as long as it was, and begins as it did. Ranks share the files out."""
        error: Exception | None = None
        try:
            names = sorted(self.index.files)
            first: dict[str, int] = {}
            for stored in (stored for tensor in self.index.tensors.values() for stored in tensor.slices):
                first[stored.file] = min(first.get(stored.file, stored.at), stored.at)
            for name in names[self.together.rank :: self.together.size]:
                file, size = self.index.files[name], self.storage.size(self.step, name)
                if size is None:
                    raise CheckpointError(f"the checkpoint is damaged ({self.where}/{name} is missing)")
                if size != file.nbytes:
                    raise CheckpointError(
                        f"the checkpoint is damaged ({self.where}/{name} has {size:,} bytes of {file.nbytes:,})"
                    )
                header = self.storage.read(self.step, name, [(0, first.get(name, size))])
                if hashlib.sha256(header).hexdigest() != file.header:
                    raise CheckpointError(f"the checkpoint is damaged ({self.where}/{name}: its header has changed)")
        except CheckpointError as found:
            error = found
        agree(self.together, error)

    # -- reading ------------------------------------------------------------------------------------------------------

    def restore(self, state: State) -> Loaded:
        sums = zeros(len(self.order), 2)
        held = 0
        error: Exception | None = None
        try:
            for item in state.items(changing=True):
                values = self._values(item)
                held += sum(numel(placed.box) for placed in item.placed()) * item.dtype.itemsize
                if item.writes:
                    found = added([_sums_of(values, placed, item) for placed in item.placed()])
                    sums[self.order[item.name]] += torch.tensor([signed(word) for word in found])
                item.write(values)
        except CheckpointError as found:
            error = found
        agree(self.together, error)
        self.together.add_up(sums)
        restored = {
            name: (int(sums[place, 0]) & MASK, int(sums[place, 1]) & MASK) for name, place in self.order.items()
        }
        self._compare(restored)
        return Loaded(self.index, hash_of(restored), self.nbytes, held)

    def _values(self, item: Item) -> torch.Tensor:
        """What the rank holds of a tensor, flat, with padding 0."""
        values = torch.zeros(item.size, dtype=item.dtype)
        for placed in item.placed():
            for stored, shared in self._stored(item.name, placed):
                target = placed.within(shared)
                shape = extent(shared)
                values.as_strided(shape, target.strides, target.offset).copy_(
                    self._read(item.name, stored, shared).view(shape)
                )
        return values

    def _stored(self, name: str, placed: Placed) -> Iterator[tuple[Stored, tuple[tuple[int, int], ...]]]:
        for stored in self.index.tensors[name].slices:
            shared = common(stored.box, placed.box)
            if shared is not None:
                yield stored, shared

    def _read(self, name: str, stored: Stored, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        kind = self.index.tensors[name].dtype
        rows, size = rows_of(box, stored.box), BYTES[kind]
        ranges = [(stored.at + start * size, rows.length * size) for start in rows.starts]
        found = self.storage.read(self.step, stored.file, ranges)
        self.nbytes += len(found)
        return torch.frombuffer(found, dtype=TORCH[kind])

    # -- after --------------------------------------------------------------------------------------------------------

    def _compare(self, restored: Mapping[str, Sums]) -> None:
        wrong = [
            name
            for name, tensor in self.index.tensors.items()
            if added([stored.sums for stored in tensor.slices]) != restored[name]
        ]
        if not wrong:
            return
        files = sorted({file for name in wrong for file in self._damaged(name)}) if self.together.is_first else []
        files = self.together.told(files)
        what = ", ".join(f"{self.where}/{file}" for file in files) or f"{self.where} was changed while it was read"
        raise CheckpointError(f"the checkpoint is damaged ({what}: bytes of {few(wrong, 4)} have changed)")

    def _damaged(self, name: str) -> Iterator[str]:
        tensor = self.index.tensors[name]
        for stored in tensor.slices:
            if sums_of(self._read(name, stored, stored.box), stored.box, tensor.shape) != stored.sums:
                yield stored.file


def _sums_of(values: torch.Tensor, placed: Placed, item: Item) -> Sums:
    box = values.as_strided(extent(placed.box), placed.strides, placed.offset)
    return sums_of(box.contiguous(), placed.box, item.shape)
