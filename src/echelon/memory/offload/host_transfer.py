"""Between a device and its host: copies beside compute, and every byte that crosses, counted.

On a GPU a copy runs on a stream of its own, one for each way, from and into memory that is locked in its place. On a
CPU, where "device" and "host" are two tensors in one memory, it is made at once; nothing above this file differs.

[Note: three clocks]

Python queues work; the compute stream does it later; a copy stream does its own at the same time. So a copy names what
it waits for, a `Mark` on the compute stream, and who needs it waits for its `Moving`: `wait` makes the compute stream
wait, and Python goes on; `done` makes Python wait, after which memory at both ends may be used for something else.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

DOWN, UP = "down", "up"
"""to the host, and back"""
REGISTERED = 1 << 20
"""bytes from which memory is locked as it is; torch would round its size up to a power of two"""


class Moving:
    """A copy under way, or a mark: what was queued when it was made. Without an event it is through."""

    def __init__(self, event: Any = None):
        self._event = event

    def wait(self) -> None:
        """What the device is given after this begins when the copy is through."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> None:
        """Returns when the copy is through."""
        if self._event is not None:
            self._event.synchronize()

    def before(self, stream: Any) -> None:
        if self._event is not None:
            stream.wait_event(self._event)


THROUGH = Moving()


class Link:
    """One device's way to its host."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.moved: Counter[tuple[str, str]] = Counter()
        """bytes, by way and by what they are"""
        self._lock = threading.Lock()
        self._streams: dict[str, Any] = {}
        if self.on_gpu:
            self._streams = {way: torch.cuda.Stream(device) for way in (DOWN, UP)}

    def enter(self) -> None:
        """A new thread works with this device. It would begin with the first, and take some of its memory."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host that copies may use beside compute."""
        if not self.on_gpu:
            return torch.empty(numel, dtype=dtype)
        if numel * dtype.itemsize < REGISTERED:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        return _locked(torch.empty(numel, dtype=dtype))

    def mark(self) -> Moving:
        """What this thread has given the device so far."""
        if not self.on_gpu:
            return THROUGH
        return Moving(_event(torch.cuda.current_stream(self.device)))

    def down(
        self, source: Tensor, target: Tensor, kind: str, *, after: Moving | None = None, factor: Tensor | None = None
    ) -> Moving:
        """From the device to the host; with a `factor` the source is multiplied by it first, where it lies."""
        return self._copy(DOWN, source, target, kind, after, factor)

    def up(self, source: Tensor, target: Tensor, kind: str, *, after: Moving | None = None) -> Moving:
        """From the host to the device. Without `after` it waits for everything that this thread has queued."""
        return self._copy(UP, source, target, kind, after, None)

    def ask(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Asks for a few numbers as they are now. Whoever reads them waits for what made them."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.on_gpu)
        there.copy_(tensor, non_blocking=True)
        come = self.mark()

        def read() -> list[float]:
            come.done()
            return there.tolist()  # type: ignore[no-any-return]

        return read

    @torch.no_grad()
    def _copy(
        self, way: str, source: Tensor, target: Tensor, kind: str, after: Moving | None, factor: Tensor | None
    ) -> Moving:
        with self._lock:
            self.moved[way, kind] += source.nbytes
        mark = self.mark() if after is None else after
        with self._on(way) as _:
            if self.on_gpu:
                mark.before(self._streams[way])
            if factor is not None:
                source.mul_(factor)
            target.copy_(source, non_blocking=True)
            if not self.on_gpu:
                return THROUGH
            return Moving(_event(self._streams[way]))

    def _on(self, way: str) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[way]) if self.on_gpu else nullcontext()


def _event(stream: Any) -> Any:
    """On a stream, now. Whoever waits for it sleeps, and leaves its core to others."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _locked(tensor: Tensor) -> Tensor:
    """The tensor, or one like it, whose memory the system may no longer move, until it is freed."""
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    release = weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, tensor.data_ptr())
    release.atexit = False
    return tensor


class Room:
    """One of some buffers on the host that are used in turn."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.moving = THROUGH
        """what is still reading it"""

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As a tensor of so many elements."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class Rooms:
    """So many of them, for whichever thread asks. They are made when they are first needed."""

    def __init__(self, link: Link, count: int, nbytes: int):
        self._make: Callable[[], Tensor] = lambda: link.room(nbytes, torch.uint8)
        self._left, self._lock = count, threading.Lock()
        self._free: queue.SimpleQueue[Room] = queue.SimpleQueue()

    def take(self) -> Room:
        """A free one; waits until there is one."""
        with self._lock:
            fresh = self._free.empty() and self._left > 0
            self._left -= fresh
        room = Room(self._make()) if fresh else self._free.get()
        room.moving.done()
        room.moving = THROUGH
        return room

    def take_if_free(self) -> Room | None:
        """A free one, or none."""
        with self._lock:
            if self._left <= 0 and self._free.empty():
                return None
        return self.take()

    def give_back(self, room: Room, moving: Moving = THROUGH) -> None:
        """It is free when `moving` is through."""
        room.moving = moving
        self._free.put(room)
