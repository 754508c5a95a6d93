"""A unit whose states live on the host: master values, moments, and where it is asked for parameters and gradients too.

[Note: two sides of a unit]

    on the device (FlatUnit)                          on the host (HostUnit)
    gradients, added up over microbatches ── down ──> the gradient, in a room that units share    (`optimizer`)
    a gradient that comes once a step     ── down ──> a room of its own, as soon as it is there   (`optimizer`)
    a gradient of every microbatch        ── down ──> added to the sum, by the worker             (`params`)
                                                      update of master values and moments, by the worker
    this rank's part of the parameters   <─── up ──── a cast of the master values

To an update (optim/) the host's side looks like a unit whose device is the host. Only the worker touches it while a
step's update is under way: everybody else calls `wait` first, and every way in here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.layout.placement import ParamGroupSpec
from echelon.memory.offload.disk_store import DiskFolder, DiskStore
from echelon.memory.offload.host_transfer import COMPLETED, CopyEvent, HostBuffer, HostBufferQueue, HostLink
from echelon.memory.offload.host_worker import FINISHED, HostWorker, JobHandle
from echelon.parallel.dp.master_weights import FULL_SHARD, UnsplitMasterWeights
from echelon.parallel.dp.zero import ShardingPolicy

GRAD_BUFFERS = 3
"""buffers for gradients: one is read by the update, one comes, one is free to be asked for"""
STAGING_BUFFERS = 2
"""buffers for parameters on their way up"""


@dataclass(frozen=True, kw_only=True)
class OffloadHost:
    """What all units of a rank share on the host."""

    link: HostLink
    worker: HostWorker
    grad_buffers: HostBufferQueue
    """for gradients on their way down"""
    param_staging: HostBufferQueue
    """for parameters on their way up"""
    read_ahead: HostBufferQueue
    """for parameters that are read ahead from disk"""
    paged: bool
    """parameters and gradients live here too"""
    disk: DiskFolder | None = None
    """where files hold what would be here"""

    @classmethod
    def create(
        cls,
        link: HostLink,
        groups: Sequence[ParamGroupSpec],
        *,
        master_bytes: int,
        compute_bytes: int,
        paged: bool,
        disk: DiskFolder | None,
    ) -> OffloadHost:
        masters, parts = (
            max(unit.shard_numel * unit.element_bytes(size) for unit in groups)
            for size in (master_bytes, compute_bytes)
        )
        worker = HostWorker("echelon-host")
        worker.submit("finding its device", link.set_device)
        return cls(
            link=link,
            worker=worker,
            grad_buffers=HostBufferQueue(link, GRAD_BUFFERS, masters),
            param_staging=HostBufferQueue(link, STAGING_BUFFERS, parts),
            read_ahead=HostBufferQueue(link, GRAD_BUFFERS, parts),
            paged=paged,
            disk=disk,
        )


def buffer_bytes(largest: int, master: torch.dtype, compute: torch.dtype) -> int:
    """What units share on the host, where nothing is on disk."""
    return largest * (GRAD_BUFFERS * master.itemsize + STAGING_BUFFERS * compute.itemsize)


class OffloadedParamGroup:
    """The host's side of one unit."""

    def __init__(
        self,
        spec: ParamGroupSpec,
        policy: ShardingPolicy,
        host: OffloadHost,
        *,
        device_shard: Tensor | None,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        sends_grad_early: bool,
    ):
        self.spec, self.policy, self.host = spec, policy, host
        self.compute_dtype, self.received_dtype = compute_dtype, grad_dtype
        self.master_shard = torch.zeros(spec.shard_numel, dtype=master_dtype)
        """master values"""
        self.device_shard = device_shard
        """on the device, this rank's part of the parameters; none where they are paged"""
        self.host_shard: Tensor | None = None
        """that part on the host, where it is not on the device"""
        if device_shard is None and host.disk is None:
            self.host_shard = host.link.empty_pinned(spec.shard_numel, compute_dtype)
        self.store: DiskStore | None = None
        """master values and whatever the optimizer keeps, on disk"""
        self.param_store: DiskStore | None = None
        """the part of the parameters, on disk"""
        if host.disk is not None:
            self.store = host.disk.open_store(f"{self._file_name}.states")
            self.store.reserve(self.master_shard.nbytes)
            if device_shard is None:
                self.param_store = host.disk.open_store(f"{self._file_name}.part")
                self.param_store.reserve(spec.shard_numel * compute_dtype.itemsize)
        self.optimizer_states: Callable[[], list[Tensor]] = list
        """what the optimizer keeps of it, element by element"""
        self.after_update_hooks: list[Callable[[], None]] = []
        """what the worker does after each update of it"""
        self.sends_grad_early = sends_grad_early
        """its gradient comes once a step, as it is used: it leaves the device as soon as it is there"""
        self.host_grad: Tensor | None = None
        """a gradient of its own: the one that came early, or the sum over microbatches"""
        if sends_grad_early:
            self.host_grad = host.link.empty_pinned(spec.shard_numel, grad_dtype)
        elif host.paged:
            self.host_grad = torch.zeros(spec.shard_numel, dtype=master_dtype)
        self.update_turn: JobHandle = FINISHED
        """its own part of the update that is under way"""
        self.update_job: JobHandle = FINISHED
        """the whole of it"""
        self.param_copy: CopyEvent = COMPLETED
        """the part of the parameters on its way up"""
        self._params_stale = True
        self._no_grad_yet = True
        self._grad_turn: JobHandle = FINISHED
        self._grad_copy: CopyEvent = COMPLETED
        self._read_ahead: tuple[HostBuffer, JobHandle] | None = None

    # -- as an update sees it -----------------------------------------------------------------------------------------

    @property
    def master(self) -> UnsplitMasterWeights:
        return UnsplitMasterWeights(self.master_shard, in_place=False)

    @property
    def unsharded_param(self) -> Tensor:
        """Says where it is."""
        return self.master_shard

    @property
    def grad_dtype(self) -> torch.dtype:
        """While an update is made: a gradient that came in a shorter type has been cast."""
        return self.master_shard.dtype

    lazy_grads = True
    grad: Tensor
    """in the master's type, while an update is made"""

    # -- for everybody else -------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong on the host."""
        self.update_turn.wait()
        self.update_job.wait()
        self._grad_turn.wait()

    def is_ready(self) -> bool:
        """Its values are here. Where they are on disk, they are asked for."""
        if not self.update_turn.is_done:
            return False
        if self.param_store is None:
            return True
        if self._read_ahead is None and (room := self.host.read_ahead.try_acquire()) is not None:
            assert self.host.disk is not None
            job = partial(self.param_store.load, [room.view(self.spec.shard_numel, self.compute_dtype)])
            self._read_ahead = room, self.host.disk.reader.submit(f"reading {self.name}", job)
        return self._read_ahead is not None and self._read_ahead[1].is_done

    def drop_read_ahead(self) -> None:
        """What was read ahead and not used, for a layer that was not called, is old when the values change."""
        if self._read_ahead is not None:
            room, reading = self._read_ahead
            self._read_ahead = None
            reading.wait()
            self.host.read_ahead.release(room)

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """The master values; a copy, where they are on disk."""
        self.wait()
        return (self.master_shard if self.store is None else self.read_store()[0])[part]

    def set_values(self, start: int, values: Tensor) -> None:
        """Some master values; `rest` when all are set."""
        self.wait()
        if self.store is not None and not self._params_stale:
            self.load_store()
        self.allocate()
        self.master_shard[start : start + len(values)] = values.to(self.master_shard.device)
        self._params_stale = True

    def flush(self) -> None:
        """What was set goes where it lives."""
        if self.store is None or not self._params_stale:
            return
        self._params_stale = False
        if self.device_shard is not None:
            self.param_copy.wait()  # older values may still be on their way there
            self.device_shard.copy_(self.master_shard)
        elif self.param_store is not None:
            self.param_store.save([self.master_shard.to(self.compute_dtype)])
            self.param_store.commit()
        self.save_store()
        self.store.commit()

    # -- disk ---------------------------------------------------------------------------------------------------------

    def stored_tensors(self) -> list[Tensor]:
        """In the order of the file."""
        return [self.master_shard, *self.optimizer_states()]

    def read_store(self) -> list[Tensor]:
        """What is in the file, as copies."""
        assert self.store is not None
        found = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in self.stored_tensors()]
        self.store.load(found)
        return found

    def load_store(self) -> None:
        """From disk into memory."""
        assert self.store is not None
        self.allocate()
        self.store.load(self.stored_tensors())

    def allocate(self) -> None:
        """Memory for what is on disk."""
        for tensor in self.stored_tensors():
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)

    def save_store(self) -> None:
        """From memory to disk."""
        assert self.store is not None
        tensors = self.stored_tensors()
        self.store.reserve(sum(tensor.nbytes for tensor in tensors))
        self.store.save(tensors)
        self.free_memory()

    def free_memory(self) -> None:
        """Of the memory of what is on disk."""
        for tensor in self.stored_tensors() if self.store is not None else ():
            tensor.untyped_storage().resize_(0)

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """What is on disk is in memory, to be read and changed."""
        self.wait()
        if self.store is None:
            yield
            return
        self.load_store()
        try:
            yield
        finally:
            self.save_store()
            self.store.commit()

    @property
    def _file_name(self) -> str:
        return self.spec.name.replace("/", "_") or "outside"

    # -- parameters ---------------------------------------------------------------------------------------------------

    def param_shard(self, destination: Tensor) -> Tensor:
        """This rank's part of the parameters on the device: it is there when `coming` is through."""
        self.update_turn.wait()
        if self._params_stale:
            place = self.host_shard if self.device_shard is None else self.device_shard
            assert place is not None
            self.param_copy.synchronize()  # a copy from before may still be on its way, and read what this thread writes
            place.copy_(self.master_shard)
            self._params_stale = False
        if self.device_shard is not None:
            return self.device_shard
        link = self.host.link
        if self.param_store is None:
            assert self.host_shard is not None
            self.param_copy = link.copy_to_device(self.host_shard, destination, "parameters")
            return destination
        room, reading = self._read_ahead or (None, FINISHED)
        reading.wait()
        rooms = self.host.read_ahead
        if room is None:  # all rooms were full
            room, rooms = self.host.param_staging.acquire(), self.host.param_staging
            self.param_store.load([room.view(self.spec.shard_numel, self.compute_dtype)])
        self.param_copy = link.copy_to_device(
            room.view(self.spec.shard_numel, self.compute_dtype), destination, "parameters"
        )
        rooms.release(room, self.param_copy)
        self._read_ahead = None
        return destination

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def has_grad(self) -> bool:
        """This step's gradient, or what there is of it, is on the host and not on the device."""
        return self.host_grad is not None and not self._no_grad_yet

    def wait_grad(self) -> Tensor:
        """The gradient that is on the host, as it is now."""
        self.wait()
        assert self.host_grad is not None
        self._grad_copy.synchronize()
        return self.host_grad

    def begin_step(self) -> None:
        self._no_grad_yet = True

    def send_grad(self, grad: Tensor) -> None:
        """The gradient of this step leaves the device. Whoever owns it may let go of it."""
        self.update_turn.wait()
        assert self.host_grad is not None
        moving = self._grad_copy = self.host.link.copy_to_host(grad, self.host_grad, "gradients")
        self._no_grad_yet = False
        # Until the copy is through, its memory must not be given to anybody else.
        self._grad_turn = self.host.worker.submit(f"the gradient of {self.name}", partial(_wait_holding, moving, grad))

    def add_grad(self, grad: Tensor) -> None:
        """The gradient of a microbatch leaves the device, to be added to the others."""
        host, first = self.host, self._no_grad_yet
        self._no_grad_yet = False
        if first:
            self.update_turn.wait()
        room = host.grad_buffers.acquire()
        there = room.view(grad.numel(), grad.dtype)
        moving = host.link.copy_to_host(grad, there, "gradients")
        own, rooms = self.host_grad, host.grad_buffers
        assert own is not None

        def put(held: Tensor = grad) -> None:
            moving.synchronize()
            own.copy_(there) if first else own.add_(there)
            rooms.release(room)

        self._grad_turn = host.worker.submit(f"the gradient of {self.name}", put)

    @property
    def name(self) -> str:
        return self.spec.name or "what is outside the layers"

    # -- for the worker -----------------------------------------------------------------------------------------------

    def run_after_update_hooks(self) -> None:
        for follow in self.after_update_hooks:
            follow()

    def publish_params(self, after: CopyEvent) -> None:
        """The parameters follow from the master values: on their way to the device, or here to be fetched."""
        if self.host_shard is not None:
            self.host_shard.copy_(self.master_shard)
            return
        room = self.host.param_staging.acquire()
        staged = room.view(self.master_shard.numel(), self.compute_dtype)
        staged.copy_(self.master_shard)
        if self.param_store is not None:
            self.param_store.save([staged])
            self.host.param_staging.release(room)
            return
        assert self.device_shard is not None
        self.param_copy = self.host.link.copy_to_device(staged, self.device_shard, "parameters", after=after)
        self.host.param_staging.release(room, self.param_copy)


def _wait_holding(moving: CopyEvent, _held: Tensor) -> None:
    moving.synchronize()


class HostMasterWeights:
    """What a unit on the device sees of master values on the host (master.py)."""

    in_place = False

    def __init__(self, group: OffloadedParamGroup):
        self.group, self.dtype = group, group.master_shard.dtype

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """As a step's update has left them."""
        return self.group.values(part)

    def set_values(self, start: int, values: Tensor) -> None:
        self.group.set_values(start, values)

    def param_shard(self, destination: Tensor) -> Tensor:
        """This rank's part of the parameters, to be gathered."""
        return self.group.param_shard(destination)

    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return (self.group.master_shard,)
