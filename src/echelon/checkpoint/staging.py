"""A rank's part of a checkpoint in host memory, laid out as its file will be.

Training waits only for this copy. The memory is made once and used by every save; beside a GPU it is pinned, and the
copies are queued behind the step that made the values, so that not even the host waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.checkpoint.index import Region, header_of
from echelon.checkpoint.slices import Placed, extent, numel
from echelon.checkpoint.state import TYPES, State
from echelon.checkpoint.sums import Sums, sums_of


@dataclass
class _Waiting:
    """Values that lie side by side, and will in the file: one copy for all of them."""

    values: Tensor
    at: int
    count: int

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
        self._cuda = device.type == "cuda"
        boxes: list[tuple[int, str, torch.dtype, tuple[int, ...], Placed]] = []
        self._whole: dict[int, int] = {}
        """items without padding, which are one copy, by their number: how many elements"""
        for number, item in enumerate(state.items()):
            if item.writes and item.size:
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
        self.nbytes = at
        self.memory = torch.zeros(at, dtype=torch.uint8, pin_memory=self._cuda)
        self._ready: torch.cuda.Event | None = None

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Copies the state as it is now."""
        waiting = _Waiting(self.memory[:0], 0, 0)
        for number, item in enumerate(state.items()):
            copies = self._copies.get(number)
            if not copies:
                continue
            values = item.read()
            if number in self._whole:
                at, count = copies[0][1], self._whole[number]
                if not (item.stays and waiting.takes(values, at, count)):
                    self._copy(waiting)
                    waiting = _Waiting(values, at, count)
                    if not item.stays:
                        self._copy(waiting)
                continue
            for placed, at in copies:
                shape = extent(placed.box)
                box = values.as_strided(shape, placed.strides, values.storage_offset() + placed.offset)
                self._view(at, numel(placed.box), item.dtype).view(shape).copy_(box, non_blocking=True)
        self._copy(waiting)
        if self._cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def _copy(self, waiting: _Waiting) -> None:
        if waiting.count:
            values = waiting.values
            flat = values.as_strided((waiting.count,), (1,), values.storage_offset())
            self._view(waiting.at, waiting.count, values.dtype).copy_(flat, non_blocking=True)
            waiting.count = 0

    def wait(self) -> None:
        """Until the copies are through."""
        if self._ready is not None:
            self._ready.synchronize()

    def sums(self) -> list[Sums]:
        """Of every region."""
        found = []
        for region, dtype in zip(self.regions, self._types, strict=True):
            values = self._view(region.at, numel(region.box), dtype)
            found.append(sums_of(values, region.box, region.shape))
        return found

    def view(self) -> memoryview:
        return memoryview(self.memory.numpy().data)

    def _view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.memory[at : at + count * dtype.itemsize].view(dtype)
