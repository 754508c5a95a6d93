"""Staging of a rank's part of a checkpoint in host memory, as the bytes of its file.

[Note: what training waits for]

Weights and optimizer states change only in an update. So they are copied while the next step's forward and backward
run, and only its update waits if the copy has not finished:

    training     step 100 | forward, backward of step 101 | update
    background            |  copy    |                               `wait_before_update` is called before the update
                            | write, checksums, ...                  they follow the copy (`wait_for_bytes`)

On a GPU the copy runs on its own stream, and the update waits for an event; the host does not wait. State that changes
at other times (statistics of BatchNorm, the loss scale) is copied at once. So is everything where updates run in
backward, on the host, or at different times in different stages.

The buffer is allocated once and used by every save; for a GPU it is pinned. It is page-aligned, and so are the tensors
in it, for direct I/O (direct_io.py).
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
"""bytes between two notifications of the threads that follow the copy"""


@dataclass
class _PendingCopy:
    """A copy of values that are contiguous in memory and in the file."""

    values: Tensor
    offset: int
    count: int
    in_background: bool = False

    def try_extend(self, values: Tensor, at: int, count: int) -> bool:
        """Extend the copy if these values follow it in memory and in the file."""
        first, size = self.values, values.element_size()
        if (
            not self.count
            or values.dtype != first.dtype
            or values.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or values.data_ptr() != first.data_ptr() + self.count * size
            or at != self.offset + self.count * size
        ):
            return False
        self.count += count
        return True


class HostStaging:
    """The host buffer of a rank's file, and the copies into it."""

    def __init__(self, state: TrainingState, device: torch.device):
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        boxes: list[tuple[int, str, torch.dtype, tuple[int, ...], PlacedBox]] = []
        self._unpadded: dict[int, int] = {}
        """{item number: elements} of items without padding, which one copy suffices for"""
        self._stable: set[int] = set()
        """numbers of the items whose `read` returns the state itself until the next update, not a copy"""
        for number, item in enumerate(state.items()):
            if item.is_writer and item.size:
                if item.stable_until_update and is_read_in_place(item):
                    self._stable.add(number)
                if not item.local_slice.is_padded:
                    self._unpadded[number] = item.size
                boxes += [(number, item.name, item.dtype, item.shape, placed) for placed in item.boxes()]
        # Wide dtypes first, so that every tensor is aligned to its element size.
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
        buffer = torch.zeros(self.nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=self._copy_stream is not None)
        start = -buffer.data_ptr() % PAGE_BYTES
        self.memory = buffer[start : start + self.nbytes]
        self.memory[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        self._background_copies: list[tuple[Tensor, Tensor]] = []
        """(destination, source) of the copies that `run_background_copies` makes"""
        self._copied = threading.Event()
        self._bytes_copied, self._changed = 0, threading.Condition()
        """bytes from the start of the file that have been copied"""
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    @torch.no_grad()
    def snapshot(self, state: TrainingState, *, in_background: bool) -> None:
        """Copy the state as it is now. With `in_background`, `run_background_copies` copies what is stable until the
        next update."""
        self._bytes_copied, self._error, self._background_copies = 0, None, []
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._copy_stream.device))
        pending = _PendingCopy(self.memory[:0], 0, 0)
        for number, item in enumerate(state.items()):
            copies = self._copies.get(number)
            if not copies:
                continue
            values, deferred = item.read(), in_background and number in self._stable
            if number in self._unpadded:
                at, count = copies[0][1], self._unpadded[number]
                if not (
                    item.stable_until_update
                    and deferred == pending.in_background
                    and pending.try_extend(values, at, count)
                ):
                    self._copy(pending)
                    pending = _PendingCopy(values, at, count, deferred)
                    if not item.stable_until_update:
                        self._copy(pending)
                continue
            for placed, at in copies:
                shape = box_shape(placed.box)
                box = values.as_strided(shape, placed.strides, values.storage_offset() + placed.offset)
                self._put(self._region_view(at, numel(placed.box), item.dtype).view(shape), box, deferred)
        self._copy(pending)
        if self._copy_stream is not None:
            # Inside `torch.cuda.stream` the current stream would be the copy stream itself.
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._copy_stream.device))
            self._ready = torch.cuda.Event(blocking=True)  # the host sleeps while it waits
            self._ready.record(self._copy_stream)
        self._copied.clear()

    def _copy(self, pending: _PendingCopy) -> None:
        if pending.count:
            values = pending.values
            flat = values.as_strided((pending.count,), (1,), values.storage_offset())
            self._put(self._region_view(pending.offset, pending.count, values.dtype), flat, pending.in_background)
            pending.count = 0

    def _put(self, to: Tensor, values: Tensor, in_background: bool) -> None:
        if not in_background:
            to.copy_(values, non_blocking=True)
        elif self._copy_stream is None:
            self._background_copies.append((to, values))
        else:
            with torch.cuda.stream(self._copy_stream):
                to.copy_(values, non_blocking=True)

    def run_background_copies(self) -> None:
        """Make the copies from the start of the file to its end, in a background thread."""
        try:
            self._background_copies.sort(key=lambda pair: pair[0].data_ptr())
            for to, values in self._background_copies:
                at = to.data_ptr() - self.memory.data_ptr()
                for done in _copy_in_chunks(to, values):
                    self._advance(at + done)
        except BaseException as error:  # raised in `wait_for_bytes`
            self._error = error
        self._background_copies = []
        self._copied.set()
        if self._ready is not None:
            self._ready.synchronize()
        self._advance(self.nbytes)

    def _advance(self, nbytes: int) -> None:
        with self._changed:
            self._bytes_copied = nbytes
            self._changed.notify_all()

    def wait_for_bytes(self, nbytes: int) -> None:
        """Wait until this number of bytes from the start of the file has been copied."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes_copied >= nbytes)
        if self._error is not None:
            raise self._error

    def wait_before_update(self) -> None:
        """Wait until the state may change. On a GPU the stream waits, not the host."""
        if self._ready is not None:
            self._ready.wait()
        else:
            self._copied.wait()

    def checksums(self) -> list[Checksum]:
        """The checksum of every region."""
        checksums = []
        for region, dtype in zip(self.regions, self._dtypes, strict=True):
            self.wait_for_bytes(len(self.header) + region.offset + region.nbytes)
            values = self._region_view(region.offset, numel(region.box), dtype)
            checksums.append(box_checksum(values, region.box, region.shape))
        return checksums

    def file_view(self) -> memoryview:
        """The bytes of the file."""
        return memoryview(self.memory.numpy().data)

    def _region_view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        at += len(self.header)
        return self.memory[at : at + count * dtype.itemsize].view(dtype)


def is_read_in_place(item: StateItem) -> bool:
    """Whether `read` returns the state itself, not a copy (of a float32 master weight stored in two halves)."""
    # Hold both results: a freed copy would leave its address to the next one.
    one, other = item.read(), item.read()
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _copy_in_chunks(to: Tensor, values: Tensor) -> Iterator[int]:
    """Copy on one core, since training uses the others; yields the number of bytes copied so far."""
    if not values.is_contiguous():
        to.copy_(values)
        yield to.nbytes
        return
    there, here = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (to, values))
    for at in range(0, len(here), COPY_CHUNK_BYTES):
        np.copyto(there[at : at + COPY_CHUNK_BYTES], here[at : at + COPY_CHUNK_BYTES])
        yield min(at + COPY_CHUNK_BYTES, len(here))
