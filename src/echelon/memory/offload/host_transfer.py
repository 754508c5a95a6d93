"""Copies between a device and its host, overlapped with compute, with every byte counted.

On a GPU each direction has a copy stream, and host memory is pinned. On a CPU, where "device" and "host" are two
tensors in one memory, copies are synchronous; nothing above this file differs.

[Note: three clocks]

Python queues work; the compute stream executes it later; copy streams run at the same time. So a copy names what it
waits for, an event on the compute stream, and readers wait for its `CopyEvent`: `wait` makes the compute stream wait
while Python continues; `synchronize` makes Python wait, after which memory at both ends may be reused.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

DOWN, UP = "down", "up"
"""to the host, and to the device"""
MIN_REGISTERED_BYTES = 1 << 20
"""larger buffers are registered as pinned memory: torch's pinned allocator would round them up to a power of two"""


class CopyEvent:
    """An event: a copy, or the work queued so far. Without a CUDA event it is complete."""

    def __init__(self, event: Any = None):
        self._event = event

    def wait(self, stream: Any = None) -> None:
        """Make a stream, by default the current one, wait for the copy."""
        if self._event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self._event)

    def synchronize(self) -> None:
        """Block until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()


COMPLETED = CopyEvent()


class HostLink:
    """The link between a device and its host."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.bytes_moved: Counter[tuple[str, str]] = Counter()
        """bytes, by direction and category"""
        self._lock = threading.Lock()
        self._streams: dict[str, Any] = {way: torch.cuda.Stream(device) for way in (DOWN, UP)} if self.on_gpu else {}

    def set_device(self) -> None:
        """Set a new thread's device; it would default to the first, and allocate a context there."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Block until every copy is complete."""
        for stream in self._streams.values():
            stream.synchronize()

    def empty_pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory that asynchronous copies may use."""
        if not self.on_gpu:
            return torch.empty(numel, dtype=dtype)
        if numel * dtype.itemsize < MIN_REGISTERED_BYTES:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        return _pin(torch.empty(numel, dtype=dtype))

    def record_event(self) -> CopyEvent:
        """Record what this thread has queued on the device so far."""
        return CopyEvent(_event(torch.cuda.current_stream(self.device))) if self.on_gpu else COMPLETED

    def copy_to_host(
        self,
        source: Tensor,
        target: Tensor,
        category: str,
        *,
        after: CopyEvent | None = None,
        factor: Tensor | None = None,
    ) -> CopyEvent:
        """Copy from the device to the host; with `factor`, multiply the source by it in place first."""
        return self._copy(DOWN, source, target, category, after, factor)

    def copy_to_device(
        self, source: Tensor, target: Tensor, category: str, *, after: CopyEvent | None = None
    ) -> CopyEvent:
        """Copy from the host to the device; without `after`, after everything that this thread has queued."""
        return self._copy(UP, source, target, category, after, None)

    def read_async(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Start reading a few numbers; the returned function waits for them."""
        host_tensor = self.empty_pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
        host_tensor.copy_(tensor, non_blocking=True)
        ready = self.record_event()

        def read() -> list[float]:
            ready.synchronize()
            return host_tensor.tolist()

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
        start = self.record_event() if after is None else after
        stream = self._streams.get(direction)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None:
                start.wait(stream)
            if factor is not None:
                source.mul_(factor)
            target.copy_(source, non_blocking=True)
            return COMPLETED if stream is None else CopyEvent(_event(stream))


def _event(stream: Any) -> Any:
    """Record an event on a stream. Waiting for it sleeps, which leaves the core to others."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _pin(tensor: Tensor) -> Tensor:
    """Pin a tensor's memory until it is freed; return it, or a pinned tensor like it."""
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    release = weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, tensor.data_ptr())
    release.atexit = False
    return tensor


class HostBuffer:
    """A reusable buffer on the host."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.pending_copy = COMPLETED
        """the last copy that uses it"""

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """View the buffer as `numel` elements."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class HostBufferQueue:
    """At most `count` host buffers, shared by threads and allocated on first use."""

    def __init__(self, link: HostLink, count: int, nbytes: int):
        self._make: Callable[[], Tensor] = lambda: link.empty_pinned(nbytes, torch.uint8)
        self._left, self._lock = count, threading.Lock()
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()

    def acquire(self) -> HostBuffer:
        """Return a free buffer; block until there is one."""
        with self._lock:
            allocate = self._free.empty() and self._left > 0
            self._left -= allocate
        buffer = HostBuffer(self._make()) if allocate else self._free.get()
        buffer.pending_copy.synchronize()
        buffer.pending_copy = COMPLETED
        return buffer

    def try_acquire(self) -> HostBuffer | None:
        """Return a free buffer, or None."""
        with self._lock:
            if self._left <= 0 and self._free.empty():
                return None
        return self.acquire()

    def release(self, buffer: HostBuffer, copy: CopyEvent = COMPLETED) -> None:
        """Release a buffer, which is free once `copy` completes."""
        buffer.pending_copy = copy
        self._free.put(buffer)
