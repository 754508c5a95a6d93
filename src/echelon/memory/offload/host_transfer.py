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
MIN_REGISTERED_BYTES = 1 << 20
"""bytes from which memory is locked as it is; torch would round its size up to a power of two"""


class CopyEvent:
    """A copy under way, or a mark: what was queued when it was made. Without an event it is through."""

    def __init__(self, event: Any = None):
        self._event = event

    def wait(self) -> None:
        """What the device is given after this begins when the copy is through."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Returns when the copy is through."""
        if self._event is not None:
            self._event.synchronize()

    def block_stream(self, stream: Any) -> None:
        if self._event is not None:
            stream.wait_event(self._event)


COMPLETED = CopyEvent()


class HostLink:
    """One device's way to its host."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.bytes_moved: Counter[tuple[str, str]] = Counter()
        """bytes, by way and by what they are"""
        self._lock = threading.Lock()
        self._streams: dict[str, Any] = {}
        if self.on_gpu:
            self._streams = {way: torch.cuda.Stream(device) for way in (DOWN, UP)}

    def set_device(self) -> None:
        """A new thread works with this device. It would begin with the first, and take some of its memory."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def empty_pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host that copies may use beside compute."""
        if not self.on_gpu:
            return torch.empty(numel, dtype=dtype)
        if numel * dtype.itemsize < MIN_REGISTERED_BYTES:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        return _pin(torch.empty(numel, dtype=dtype))

    def record_event(self) -> CopyEvent:
        """What this thread has given the device so far."""
        if not self.on_gpu:
            return COMPLETED
        return CopyEvent(_event(torch.cuda.current_stream(self.device)))

    def copy_to_host(
        self,
        source: Tensor,
        target: Tensor,
        category: str,
        *,
        after: CopyEvent | None = None,
        factor: Tensor | None = None,
    ) -> CopyEvent:
        """From the device to the host; with a `factor` the source is multiplied by it first, where it lies."""
        return self._copy(DOWN, source, target, category, after, factor)

    def copy_to_device(
        self, source: Tensor, target: Tensor, category: str, *, after: CopyEvent | None = None
    ) -> CopyEvent:
        """From the host to the device. Without `after` it waits for everything that this thread has queued."""
        return self._copy(UP, source, target, category, after, None)

    def read_async(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Asks for a few numbers as they are now. Whoever reads them waits for what made them."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.on_gpu)
        there.copy_(tensor, non_blocking=True)
        come = self.record_event()

        def read() -> list[float]:
            come.synchronize()
            return there.tolist()

        return read

    @torch.no_grad()
    def _copy(
        self,
        direction: str,
        source: Tensor,
        target: Tensor,
        category: str,
        after: CopyEvent | None,
        factor: Tensor | None,
    ) -> CopyEvent:
        with self._lock:
            self.bytes_moved[direction, category] += source.nbytes
        mark = self.record_event() if after is None else after
        with self._stream_context(direction) as _:
            if self.on_gpu:
                mark.block_stream(self._streams[direction])
            if factor is not None:
                source.mul_(factor)
            target.copy_(source, non_blocking=True)
            if not self.on_gpu:
                return COMPLETED
            return CopyEvent(_event(self._streams[direction]))

    def _stream_context(self, direction: str) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[direction]) if self.on_gpu else nullcontext()


def _event(stream: Any) -> Any:
    """On a stream, now. Whoever waits for it sleeps, and leaves its core to others."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _pin(tensor: Tensor) -> Tensor:
    """The tensor, or one like it, whose memory the system may no longer move, until it is freed."""
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    release = weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, tensor.data_ptr())
    release.atexit = False
    return tensor


class HostBuffer:
    """One of some buffers on the host that are used in turn."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.pending_copy = COMPLETED
        """what is still reading it"""

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As a tensor of so many elements."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class HostBufferQueue:
    """So many of them, for whichever thread asks. They are made when they are first needed."""

    def __init__(self, link: HostLink, count: int, nbytes: int):
        self._make: Callable[[], Tensor] = lambda: link.empty_pinned(nbytes, torch.uint8)
        self._left, self._lock = count, threading.Lock()
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()

    def acquire(self) -> HostBuffer:
        """A free one; waits until there is one."""
        with self._lock:
            fresh = self._free.empty() and self._left > 0
            self._left -= fresh
        room = HostBuffer(self._make()) if fresh else self._free.get()
        room.pending_copy.synchronize()
        room.pending_copy = COMPLETED
        return room

    def try_acquire(self) -> HostBuffer | None:
        """A free one, or none."""
        with self._lock:
            if self._left <= 0 and self._free.empty():
                return None
        return self.acquire()

    def release(self, buffer: HostBuffer, copy: CopyEvent = COMPLETED) -> None:
        """It is free when `moving` is through."""
        buffer.pending_copy = copy
        self._free.put(buffer)
