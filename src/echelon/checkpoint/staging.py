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

from echelon.checkpoint.checkpoint_index import PAGE, Region, header_of
from echelon.checkpoint.checksums import Sums, sums_of
from echelon.checkpoint.tensor_slices import Placed, extent, numel
from echelon.checkpoint.training_state import TYPES, Item, State

CHUNK = 1 << 24
"""bytes of a copy, after which those who follow are told"""


@dataclass
class _Waiting:
    """Values that lie side by side, and will in the file: one copy for all of them."""

    values: Tensor
    at: int
    count: int
    lasts: bool = False

    def takes(self, values: Tensor, at: int, count: int) -> bool:
        """These come right behind, in memory and in the file."""
        mine, size = self.values, values.element_size()
        if (
            not self.count
            or values.dtype != mine.dtype
            or values.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            or values.data_ptr() != mine.data_ptr() + self.count * size
            or at != self.at + self.count * size
        ):
            return False
        self.count += count
        return True


class Staging:
    def __init__(self, state: State, device: torch.device):
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        boxes: list[tuple[int, str, torch.dtype, tuple[int, ...], Placed]] = []
        self._whole: dict[int, int] = {}
        """items without padding, which are one copy, by their number: how many elements"""
        self._lasting: set[int] = set()
        """items that are read as they lie, by their number; others are made when they are read"""
        for number, item in enumerate(state.items()):
            if item.writes and item.size:
                if item.lasts and lies_there(item):
                    self._lasting.add(number)
                if not item.part.padded:
                    self._whole[number] = item.size
                boxes += [(number, item.name, item.dtype, item.shape, placed) for placed in item.placed()]
        # Long types first: everything lies at a multiple of its own size.
        boxes.sort(key=lambda box: -box[2].itemsize)
        self.regions: list[Region] = []
        self._copies: dict[int, list[tuple[Placed, int]]] = {}
        self._types: list[torch.dtype] = []
        at = 0
        for number, name, dtype, shape, placed in boxes:
            self.regions.append(Region(name, TYPES[dtype], shape, placed.box, at))
            self._types.append(dtype)
            self._copies.setdefault(number, []).append((placed, at))
            at += numel(placed.box) * dtype.itemsize
        self.header = header_of(self.regions)
        self.nbytes = len(self.header) + at
        room = torch.zeros(self.nbytes + PAGE, dtype=torch.uint8, pin_memory=self._beside is not None)
        start = -room.data_ptr() % PAGE
        self.memory = room[start : start + self.nbytes]
        self.memory[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        self._due: list[tuple[Tensor, Tensor]] = []
        """(to, from) of copies that are made in the background"""
        self._copied = threading.Event()
        self._there, self._changed = 0, threading.Condition()
        """bytes from the start of the file that are here"""
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    @torch.no_grad()
    def take(self, state: State, *, behind: bool) -> None:
        """The state as it is now. With `behind`, what lasts until the next update is copied by `copy`, before it."""
        self._there, self._error, self._due = 0, None, []
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        waiting = _Waiting(self.memory[:0], 0, 0)
        for number, item in enumerate(state.items()):
            copies = self._copies.get(number)
            if not copies:
                continue
            values, lasts = item.read(), behind and number in self._lasting
            if number in self._whole:
                at, count = copies[0][1], self._whole[number]
                if not (item.lasts and lasts == waiting.lasts and waiting.takes(values, at, count)):
                    self._copy(waiting)
                    waiting = _Waiting(values, at, count, lasts)
                    if not item.lasts:
                        self._copy(waiting)
                continue
            for placed, at in copies:
                shape = extent(placed.box)
                box = values.as_strided(shape, placed.strides, values.storage_offset() + placed.offset)
                self._put(self._view(at, numel(placed.box), item.dtype).view(shape), box, lasts)
        self._copy(waiting)
        if self._beside is not None:
            # Asked inside `torch.cuda.stream`, the current stream would be the one beside, which waits for nobody.
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
            self._ready = torch.cuda.Event(blocking=True)  # who waits for it on the host sleeps
            self._ready.record(self._beside)
        self._copied.clear()

    def _copy(self, waiting: _Waiting) -> None:
        if waiting.count:
            values = waiting.values
            flat = values.as_strided((waiting.count,), (1,), values.storage_offset())
            self._put(self._view(waiting.at, waiting.count, values.dtype), flat, waiting.lasts)
            waiting.count = 0

    def _put(self, to: Tensor, values: Tensor, lasts: bool) -> None:
        if not lasts:
            to.copy_(values, non_blocking=True)
        elif self._beside is None:
            self._due.append((to, values))
        else:
            with torch.cuda.stream(self._beside):
                to.copy_(values, non_blocking=True)

    def copy(self) -> None:
        """In the background, from the start of the file to its end."""
        try:
            self._due.sort(key=lambda pair: pair[0].data_ptr())
            for to, values in self._due:
                at = to.data_ptr() - self.memory.data_ptr()
                for done in _copied_alone(to, values):
                    self._reach(at + done)
        except BaseException as error:  # raised where somebody waits for it
            self._error = error
        self._due = []
        self._copied.set()
        if self._ready is not None:
            self._ready.synchronize()
        self._reach(self.nbytes)

    def _reach(self, there: int) -> None:
        with self._changed:
            self._there = there
            self._changed.notify_all()

    def until(self, there: int) -> None:
        """Waits for so many bytes from the start of the file."""
        with self._changed:
            self._changed.wait_for(lambda: self._there >= there)
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Before the state changes. On a GPU the host does not wait."""
        if self._ready is not None:
            self._ready.wait()
        else:
            self._copied.wait()

    def sums(self) -> list[Sums]:
        """Of every region."""
        found = []
        for region, dtype in zip(self.regions, self._types, strict=True):
            self.until(len(self.header) + region.at + region.nbytes)
            values = self._view(region.at, numel(region.box), dtype)
            found.append(sums_of(values, region.box, region.shape))
        return found

    def view(self) -> memoryview:
        """The file."""
        return memoryview(self.memory.numpy().data)

    def _view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        at += len(self.header)
        return self.memory[at : at + count * dtype.itemsize].view(dtype)


def lies_there(item: Item) -> bool:
    """What is read is the state itself, and no copy that is made for the reader (a float32 master in two halves)."""
    # Both at once: a copy that nobody holds any more leaves its place to the next one.
    one, other = item.read(), item.read()
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _copied_alone(to: Tensor, values: Tensor) -> Iterator[int]:
    """Gives how many bytes are copied, again and again. On one core: the others are training's."""
    if not values.is_contiguous():
        to.copy_(values)
        yield to.nbytes
        return
    there, here = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (to, values))
    for at in range(0, len(here), CHUNK):
        np.copyto(there[at : at + CHUNK], here[at : at + CHUNK])
        yield min(at + CHUNK, len(here))
