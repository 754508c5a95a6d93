"""A rank's part of a checkpoint in host memory: its file, as it will be on the disk.

[Note: what training waits for]

Weights and states change in an update and nowhere else. So they are copied while the next step's forward and backward
run, and only its update waits, should the copy still be under way:

    training    step 100 | forward, backward of step 101 | update
    beside it            |  copy    |                               `settle` is called before the update
                           | write, check sums, ...                 they follow it, byte by byte (`until`)

On a GPU the copy is a stream of its own, and its update waits for an event; no host waits at all. What changes at other
times (statistics of BatchNorm, the loss scale) is copied at once, and everything is where updates run in backward, on
the host, or at different times in different stages.

The memory is made once and used by every save; beside a GPU it is pinned. It starts at a page, and so do the tensors in
it: a disk can read it without the system's cache (storage.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint.checkpoint_index import PAGE_BYTES, FileRegion, safetensors_header
from echelon.checkpoint.checksums import Checksum, box_checksum
from echelon.checkpoint.tensor_slices import PlacedBox, box_shape, numel
from echelon.checkpoint.training_state import SAFETENSORS_DTYPES, StateItem, TrainingState

COPY_CHUNK_BYTES = 1 << 24
"""bytes of a copy, after which those who follow are told"""


@dataclass
class _PendingCopy:
    """Values that lie side by side, and will in the file: one copy for all of them."""

    values: Tensor
    offset: int
    count: int
    in_background: bool = False

    def try_extend(self, values: Tensor, at: int, count: int) -> bool:
        """These come right behind, in memory and in the file."""
        mine, size = self.values, values.element_size()
        if (
            not self.count
            or values.dtype != mine.dtype
            or values.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            or values.data_ptr() != mine.data_ptr() + self.count * size
            or at != self.offset + self.count * size
        ):
            return False
        self.count += count
        return True


class HostStaging:
    def __init__(self, state: TrainingState, device: torch.device):
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        boxes: list[tuple[int, str, torch.dtype, tuple[int, ...], PlacedBox]] = []
        self._unpadded: dict[int, int] = {}
        """items without padding, which are one copy, by their number: how many elements"""
        self._stable: set[int] = set()
        """items that are read as they lie, by their number; others are made when they are read"""
        for number, item in enumerate(state.items()):
            if item.is_writer and item.size:
                if item.stable_until_update and is_read_in_place(item):
                    self._stable.add(number)
                if not item.local_slice.is_padded:
                    self._unpadded[number] = item.size
                boxes += [(number, item.name, item.dtype, item.shape, placed) for placed in item.boxes()]
        # Long types first: everything lies at a multiple of its own size.
        boxes.sort(key=lambda box: -box[2].itemsize)
        self.regions: list[FileRegion] = []
        self._copies: dict[int, list[tuple[PlacedBox, int]]] = {}
        self._dtypes: list[torch.dtype] = []
        at = 0
        for number, name, dtype, shape, placed in boxes:
            self.regions.append(FileRegion(name, SAFETENSORS_DTYPES[dtype], shape, placed.box, at))
            self._dtypes.append(dtype)
            self._copies.setdefault(number, []).append((placed, at))
            at += numel(placed.box) * dtype.itemsize
        self.header = safetensors_header(self.regions)
        self.nbytes = len(self.header) + at
        room = torch.zeros(self.nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=self._copy_stream is not None)
        start = -room.data_ptr() % PAGE_BYTES
        self.memory = room[start : start + self.nbytes]
        self.memory[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        self._background_copies: list[tuple[Tensor, Tensor]] = []
        """(to, from) of copies that are made in the background"""
        self._copied = threading.Event()
        self._bytes_copied, self._changed = 0, threading.Condition()
        """bytes from the start of the file that are here"""
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    @torch.no_grad()
    def snapshot(self, state: TrainingState, *, in_background: bool) -> None:
        """The state as it is now. With `behind`, what lasts until the next update is copied by `copy`, before it."""
        self._bytes_copied, self._error, self._background_copies = 0, None, []
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._copy_stream.device))
        waiting = _PendingCopy(self.memory[:0], 0, 0)
        for number, item in enumerate(state.items()):
            copies = self._copies.get(number)
            if not copies:
                continue
            values, lasts = item.read(), in_background and number in self._stable
            if number in self._unpadded:
                at, count = copies[0][1], self._unpadded[number]
                if not (
                    item.stable_until_update
                    and lasts == waiting.in_background
                    and waiting.try_extend(values, at, count)
                ):
                    self._copy(waiting)
                    waiting = _PendingCopy(values, at, count, lasts)
                    if not item.stable_until_update:
                        self._copy(waiting)
                continue
            for placed, at in copies:
                shape = box_shape(placed.box)
                box = values.as_strided(shape, placed.strides, values.storage_offset() + placed.offset)
                self._put(self._region_view(at, numel(placed.box), item.dtype).view(shape), box, lasts)
        self._copy(waiting)
        if self._copy_stream is not None:
            # Asked inside `torch.cuda.stream`, the current stream would be the one beside, which waits for nobody.
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._copy_stream.device))
            self._ready = torch.cuda.Event(blocking=True)  # who waits for it on the host sleeps
            self._ready.record(self._copy_stream)
        self._copied.clear()

    def _copy(self, waiting: _PendingCopy) -> None:
        if waiting.count:
            values = waiting.values
            flat = values.as_strided((waiting.count,), (1,), values.storage_offset())
            self._put(self._region_view(waiting.offset, waiting.count, values.dtype), flat, waiting.in_background)
            waiting.count = 0

    def _put(self, to: Tensor, values: Tensor, lasts: bool) -> None:
        if not lasts:
            to.copy_(values, non_blocking=True)
        elif self._copy_stream is None:
            self._background_copies.append((to, values))
        else:
            with torch.cuda.stream(self._copy_stream):
                to.copy_(values, non_blocking=True)

    def run_background_copies(self) -> None:
        """In the background, from the start of the file to its end."""
        try:
            self._background_copies.sort(key=lambda pair: pair[0].data_ptr())
            for to, values in self._background_copies:
                at = to.data_ptr() - self.memory.data_ptr()
                for done in _copy_in_chunks(to, values):
                    self._advance(at + done)
        except BaseException as error:  # raised where somebody waits for it
            self._error = error
        self._background_copies = []
        self._copied.set()
        if self._ready is not None:
            self._ready.synchronize()
        self._advance(self.nbytes)

    def _advance(self, there: int) -> None:
        with self._changed:
            self._bytes_copied = there
            self._changed.notify_all()

    def wait_for_bytes(self, there: int) -> None:
        """Waits for so many bytes from the start of the file."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes_copied >= there)
        if self._error is not None:
            raise self._error

    def wait_before_update(self) -> None:
        """Before the state changes. On a GPU the host does not wait."""
        if self._ready is not None:
            self._ready.wait()
        else:
            self._copied.wait()

    def checksums(self) -> list[Checksum]:
        """Of every region."""
        found = []
        for region, dtype in zip(self.regions, self._dtypes, strict=True):
            self.wait_for_bytes(len(self.header) + region.offset + region.nbytes)
            values = self._region_view(region.offset, numel(region.box), dtype)
            found.append(box_checksum(values, region.box, region.shape))
        return found

    def file_view(self) -> memoryview:
        """The file."""
        return memoryview(self.memory.numpy().data)

    def _region_view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        at += len(self.header)
        return self.memory[at : at + count * dtype.itemsize].view(dtype)


def is_read_in_place(item: StateItem) -> bool:
    """What is read is the state itself, and no copy that is made for the reader (a float32 master in two halves)."""
    # Both at once: a copy that nobody holds any more leaves its place to the next one.
    one, other = item.read(), item.read()
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _copy_in_chunks(to: Tensor, values: Tensor) -> Iterator[int]:
    """Gives how many bytes are copied, again and again. On one core: the others are training's."""
    if not values.is_contiguous():
        to.copy_(values)
        yield to.nbytes
        return
    there, here = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (to, values))
    for at in range(0, len(here), COPY_CHUNK_BYTES):
        np.copyto(there[at : at + COPY_CHUNK_BYTES], here[at : at + COPY_CHUNK_BYTES])
        yield min(at + COPY_CHUNK_BYTES, len(here))
