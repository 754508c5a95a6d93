"""Races between streams, threads and memory, found on a CPU: `StreamOrder` checks every write and read of offload.

[Note: vector clocks]

A GPU executes what streams hold in an order that only events fix; a run on a CPU, or a lucky one on a GPU, shows no
race. So the code runs on a CPU with recording streams and events in place of torch's, and each stream and each thread
has a clock, which counts its own operations and what it knows of the others':

    an operation         happens after all earlier ones of its stream, and after what its thread knew when it queued it
    event.record         takes a copy of the stream's clock
    stream.wait_event    the stream knows what the event knows
    event.synchronize    the thread knows what the event knows
    a job's handle       knows what the worker knew when the job ended; whoever waits for it knows that too

Two accesses of the same bytes, of which one writes, must be ordered: the clock of the later one knows the earlier one.
Freed device memory may be written by the next kernel, so all copies of it must have ended for the stream that frees it.

Operations on the main thread are the compute stream's, those of the worker the host's, and tensors that only the host
reads and writes are marked by `mark_host`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.memory.offload import host_worker
from echelon.memory.offload.host_transfer import DOWN, UP, HostBufferQueue, HostLink
from echelon.memory.offload.host_worker import HostWorker, JobHandle
from echelon.parallel.dp import offload_policy

Clock = dict[str, int]
COMPUTE = "compute stream"
THREADS = MAIN_THREAD, HOST_THREAD = "main thread", "host thread"
WITHOUT_DATA = ("aten::empty", "aten::new_empty", "aten::set_", "aten::detach", "aten::resize_", "aten::_local_scalar")
"""operators that touch no element, or only wait"""


def join(clock: Clock, other: Clock) -> None:
    for owner, ticks in other.items():
        clock[owner] = max(clock.get(owner, 0), ticks)


@dataclass(frozen=True)
class Access:
    start: int
    stop: int
    writes: bool
    owner: str
    tick: int
    label: str

    def is_known_to(self, clock: Clock) -> bool:
        return clock.get(self.owner, 0) >= self.tick


class RecordingEvent:
    def __init__(self, order: StreamOrder):
        self._order, self.clock = order, Clock()

    def record(self, stream: RecordingStream) -> None:
        with self._order.lock:
            self.clock = dict(self._order.clock(stream.name))

    def synchronize(self) -> None:
        self._order.learn(self._order.thread(), self.clock)


class RecordingStream:
    def __init__(self, order: StreamOrder, name: str):
        self._order, self.name = order, name

    def wait_event(self, event: RecordingEvent) -> None:
        self._order.learn(self.name, event.clock)

    def synchronize(self) -> None:
        self._order.learn(self._order.thread(), self._order.clock(self.name))


class StreamOrder:
    """All clocks, and the accesses of every storage that later ones must be ordered after."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.races: list[str] = []
        self.checked = 0
        self._clocks: dict[str, Clock] = {}
        self._accesses: dict[int, list[Access]] = {}
        self._known: set[int] = set()
        self._on_host: set[int] = set()
        self._local = threading.local()
        self.compute = RecordingStream(self, COMPUTE)
        self._finished: weakref.WeakKeyDictionary[JobHandle, Clock] = weakref.WeakKeyDictionary()
        self._released: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()

    # -- clocks -------------------------------------------------------------------------------------------------------

    def clock(self, owner: str) -> Clock:
        return self._clocks.setdefault(owner, {})

    def learn(self, owner: str, clock: Clock) -> None:
        with self.lock:
            join(self.clock(owner), clock)

    def thread(self) -> str:
        return MAIN_THREAD if threading.current_thread() is threading.main_thread() else HOST_THREAD

    @property
    def stream(self) -> RecordingStream:
        """The current stream of this thread."""
        return getattr(self._local, "stream", self.compute)

    @contextmanager
    def use_stream(self, stream: RecordingStream) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    def _advance(self, *, on_host: bool) -> tuple[str, Clock]:
        """The owner and the clock of the operation that this thread executes or queues now."""
        thread = self.thread()
        owner = thread if on_host else self.stream.name
        clock = self.clock(owner)
        join(clock, self.clock(thread))
        clock[owner] = clock.get(owner, 0) + 1
        return owner, clock

    # -- memory -------------------------------------------------------------------------------------------------------

    def mark_host(self, tensor: Tensor) -> Tensor:
        self._on_host.add(self._key(tensor))
        return tensor

    def forget(self) -> None:
        """Drop all accesses so far: what builds an engine waits for the device."""
        with self.lock:
            self._accesses.clear()

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._free, key).atexit = False
        return key

    def _free(self, key: int) -> None:
        self.check_free(key)
        with self.lock:
            self._known.discard(key)
            self._on_host.discard(key)

    def check_free(self, key: int) -> None:
        """Device memory returns to the allocator: the compute stream may write to it from now on."""
        with self.lock:
            accesses = self._accesses.pop(key, [])
            if key in self._on_host:
                return
            clock = dict(self.clock(COMPUTE))
            for thread in THREADS:  # memory is freed when the last of them has dropped it
                join(clock, self.clock(thread))
            for access in accesses:
                if not access.is_known_to(clock):
                    self.races.append(f"memory is freed while {access.owner} runs {access.label}")

    def _access(self, tensor: Tensor, writes: bool, owner: str, clock: Clock, label: str) -> None:
        if not tensor.numel():
            return
        size, begin = tensor.itemsize, int(tensor.storage_offset())
        span = 1 + sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        now = Access(begin * size, (begin + span) * size, writes, owner, clock[owner], label)
        accesses = self._accesses.setdefault(self._key(tensor), [])
        kept = []
        for before in accesses:
            apart = before.stop <= now.start or now.stop <= before.start
            if not apart and (before.writes or writes):
                self.checked += 1
                if not before.is_known_to(clock):
                    self.races.append(f"{owner} runs {label} without waiting for {before.label} on {before.owner}")
            inside = now.start <= before.start and before.stop <= now.stop
            if not (inside and (writes or (not before.writes and before.owner == owner))):
                kept.append(before)
        self._accesses[self._key(tensor)] = [*kept, now]

    # -- operators ----------------------------------------------------------------------------------------------------

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        schema, label = func._schema, str(func._schema.name)
        if label.startswith(WITHOUT_DATA):
            return
        given = [(argument, value) for argument, value in zip(schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            (writes if is_written else reads).extend(tensors)
        inputs = {int(tensor.untyped_storage()._cdata) for tensor in (*reads, *writes)}
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in outputs if int(tensor.untyped_storage()._cdata) not in inputs]
        if not writes and outputs and not fresh:
            return  # a view
        with self.lock:
            in_copy = self.stream is not self.compute
            host = {int(t.untyped_storage()._cdata) in self._on_host for t in (*reads, *writes)}
            on_host = not in_copy and (self.thread() == HOST_THREAD or host == {True})
            owner, clock = self._advance(on_host=on_host)
            for tensor in reads:
                self._access(tensor, False, owner, clock, label)
            for tensor in (*writes, *fresh):
                self._access(tensor, True, owner, clock, label)
            for tensor in fresh if on_host else ():
                self.mark_host(tensor)
            is_async = bool(kwargs.get("non_blocking", False) or (label == "aten::copy_" and args[2:3] == (True,)))
            if True in host and False in host and not in_copy and not is_async:
                join(self.clock(self.thread()), clock)  # a blocking copy

    # -- jobs of the worker -------------------------------------------------------------------------------------------

    def submitted(self, job: Callable[[], None]) -> Callable[[], None]:
        with self.lock:
            before = dict(self.clock(self.thread()))

        def run() -> None:
            self.learn(self.thread(), before)
            with RecordingMode(self):
                job()

        return run

    def finish(self, handle: JobHandle) -> None:
        with self.lock:
            self._finished[handle] = dict(self.clock(self.thread()))

    def waited_for(self, handle: JobHandle) -> None:
        self.learn(self.thread(), self._finished.get(handle, {}))

    def release(self, buffer: Any) -> None:
        with self.lock:
            self._released[buffer] = dict(self.clock(self.thread()))

    def acquire(self, buffer: Any) -> None:
        self.learn(self.thread(), self._released.get(buffer, {}))


class RecordingMode(TorchDispatchMode):
    def __init__(self, order: StreamOrder):
        super().__init__()
        self.order = order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.order.record(func, args, kwargs or {}, out)
        return out


@contextmanager
def recorded_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamOrder]:
    """Run offload code of this context, which believes to run on a GPU, with recording streams and events."""
    order = StreamOrder()

    class RecordedLink(HostLink):
        def __init__(self, device: torch.device):
            super().__init__(device)
            self.on_gpu = True
            self._streams = {way: RecordingStream(order, f"copy stream ({way})") for way in (DOWN, UP)}

        def set_device(self) -> None:
            pass

        def empty_pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
            return order.mark_host(torch.empty(numel, dtype=dtype))

    with monkeypatch.context() as patch:
        patch.setattr(offload_policy, "HostLink", RecordedLink)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: order.stream)
        patch.setattr(torch.cuda, "stream", order.use_stream)
        patch.setattr(torch.cuda, "Event", lambda blocking=False: RecordingEvent(order))
        _patch_after(patch, JobHandle, "finish", order.finish, before=True)
        _patch_after(patch, JobHandle, "wait", order.waited_for)
        _patch_after(patch, HostBufferQueue, "release", lambda _queue, buffer, *_: order.release(buffer), before=True)
        real_acquire, real_submit = HostBufferQueue.acquire, HostWorker.submit

        def acquire(queue: HostBufferQueue) -> Any:
            buffer = real_acquire(queue)
            order.acquire(buffer)
            return buffer

        patch.setattr(HostBufferQueue, "acquire", acquire)
        patch.setattr(
            host_worker.HostWorker,
            "submit",
            lambda worker, description, job: real_submit(worker, description, order.submitted(job)),
        )
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if not nbytes:
                order.check_free(int(storage._cdata))
            return resize(storage, nbytes)

        patch.setattr(torch.UntypedStorage, "resize_", resized)
        with RecordingMode(order):
            yield order


def _patch_after(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None], *, before: bool = False
) -> None:
    real = getattr(owner, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            note(self, *args) if name != "finish" else note(self)
        result = real(self, *args, **kwargs)
        if not before:
            note(self)
        return result

    patch.setattr(owner, name, patched)
