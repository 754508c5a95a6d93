"""The three parts of an offloaded parameter group: optimizer states, parameters and gradients off the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.layout.placement import ParamGroupSpec
from echelon.memory.offload.disk_store import DiskStore
from echelon.memory.offload.host_transfer import COMPLETED, CopyEvent, HostBuffer
from echelon.memory.offload.host_worker import FINISHED, JobHandle
from echelon.parallel.dp.offload_host import OffloadHost

if TYPE_CHECKING:
    from echelon.parallel.dp.param_group import ParamGroup


def label(spec: ParamGroupSpec) -> str:
    """Return a group's name in messages."""
    return spec.name or "what is outside the layers"


def file_name(spec: ParamGroupSpec) -> str:
    return spec.name.replace("/", "_") or "outside"


class OffloadedStates:
    """Master weights and optimizer states of a group, in host memory or on disk.

    Where the device updates them, they are there during the update: the tensors are the same objects, and their memory
    changes.
    """

    def __init__(self, spec: ParamGroupSpec, host: OffloadHost, dtype: torch.dtype):
        self._link, self._pinned = host.link, host.updates_on_device and host.disk is None
        self.master = self._host_memory(torch.empty(spec.shard_numel, dtype=dtype, device="meta")).zero_()
        self.optimizer_states: Callable[[], list[Tensor]] = list
        """the optimizer's states without step counts"""
        self._host_tensors: list[Tensor] = []
        """host memory of tensors that are on the device"""
        self.store: DiskStore | None = None
        """the file of master weights and states, if they live on disk"""
        if host.disk is not None:
            self.store = host.disk.open_store(f"{file_name(spec)}.states")
            self.store.reserve(self.master.nbytes)

    def tensors(self) -> list[Tensor]:
        """Return master weights and states, in the order of the file."""
        return [self.master, *self.optimizer_states()]

    def _host_memory(self, like: Tensor) -> Tensor:
        """Allocate host memory for a tensor; pinned, if it is copied to the device and is not freed."""
        if self._pinned:
            return self._link.empty_pinned(like.numel(), like.dtype).view(like.shape)
        return torch.empty(like.shape, dtype=like.dtype)

    def fetch(self) -> CopyEvent:
        """Move the tensors to the device; they are complete when the returned copy is."""
        copy = COMPLETED
        for tensor in self.tensors():
            on_device = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._link.device)
            copy = self._link.copy_to_device(tensor, on_device, "states")
            self._host_tensors.append(tensor.data)
            tensor.data = on_device
        return copy

    def evict(self) -> tuple[CopyEvent, list[Tensor]]:
        """Move the tensors to the host; return the copy, and their device memory, to be held until it is complete."""
        copy, device_memory = COMPLETED, []
        for index, tensor in enumerate(self.tensors()):
            if index == len(self._host_tensors):  # a new state
                self._host_tensors.append(self._host_memory(tensor))
            copy = self._link.copy_to_host(tensor, self._host_tensors[index], "states")
            device_memory.append(tensor.data)
            tensor.data = self._host_tensors[index]
        self._host_tensors = []
        return copy, device_memory

    def read(self) -> list[Tensor]:
        """Return copies of the tensors on disk."""
        assert self.store is not None
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in self.tensors()]
        self.store.load(copies)
        return copies

    def load(self) -> None:
        """Read the tensors from disk into memory."""
        assert self.store is not None
        self.allocate()
        self.store.load(self.tensors())

    def allocate(self) -> None:
        """Allocate memory for tensors on disk."""
        for tensor in self.tensors():
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)

    def save(self) -> None:
        """Write the tensors from memory to disk, and free the memory."""
        assert self.store is not None
        tensors = self.tensors()
        self.store.reserve(sum(tensor.nbytes for tensor in tensors))
        self.store.save(tensors)
        self.free()

    def free(self) -> None:
        """Free the memory of tensors on disk."""
        for tensor in self.tensors() if self.store is not None else ():
            tensor.untyped_storage().resize_(0)


class OffloadedParams:
    """This rank's shard of a group's parameters in the compute dtype: on the device, on the host, or on disk."""

    def __init__(self, spec: ParamGroupSpec, host: OffloadHost, device_shard: Tensor | None, dtype: torch.dtype):
        self.spec, self.host, self.dtype = spec, host, dtype
        self.device_shard = device_shard
        """the shard on the device; None if parameters are paged"""
        self.host_shard: Tensor | None = None
        """the shard on the host, if it is paged"""
        self.store: DiskStore | None = None
        """the file of the shard, if it is paged to disk"""
        if device_shard is None and host.disk is None:
            self.host_shard = host.link.empty_pinned(spec.shard_numel, dtype)
        elif device_shard is None and host.disk is not None:
            self.store = host.disk.open_store(f"{file_name(spec)}.part")
            self.store.reserve(spec.shard_numel * dtype.itemsize)
        self.copy: CopyEvent = COMPLETED
        """the copy of the shard to the device"""
        self.is_stale = True
        """the master weights were set since the shard was derived from them"""
        self._read_ahead: tuple[HostBuffer, JobHandle] | None = None

    def is_ready(self) -> bool:
        """Return whether the shard is in memory; if it is on disk, read it ahead."""
        if self.store is None:
            return True
        if self._read_ahead is None and (buffer := self.host.read_ahead.try_acquire()) is not None:
            assert self.host.disk is not None
            job = partial(self.store.load, [buffer.view(self.spec.shard_numel, self.dtype)])
            self._read_ahead = buffer, self.host.disk.reader.submit(f"reading {label(self.spec)}", job)
        return self._read_ahead is not None and self._read_ahead[1].is_done

    def drop_read_ahead(self) -> None:
        """Drop a shard that was read ahead and not used, for a layer that was not called: it is stale."""
        if self._read_ahead is not None:
            buffer, reading = self._read_ahead
            self._read_ahead = None
            reading.wait()
            self.host.read_ahead.release(buffer)

    def refresh(self, master: Tensor) -> None:
        """Derive the shard from master weights that were set, if it is not on disk."""
        if self.is_stale:
            shard = self.host_shard if self.device_shard is None else self.device_shard
            assert shard is not None
            self.copy.synchronize()  # an earlier copy may still read what this thread writes
            shard.copy_(master)
            self.is_stale = False

    def flush(self, master: Tensor) -> None:
        """Derive the shard from master weights that are about to leave for the disk."""
        self.is_stale = False
        if self.device_shard is not None:
            self.copy.wait()  # an earlier copy to the same place
            self.device_shard.copy_(master)
        elif self.store is not None:
            self.store.save([master.to(self.dtype)])
            self.store.commit()

    def fetch(self, destination: Tensor) -> Tensor:
        """Return the shard on the device, complete when `copy` is; a paged one is copied to `destination`."""
        if self.device_shard is not None:
            return self.device_shard
        link = self.host.link
        if self.store is None:
            assert self.host_shard is not None
            self.copy = link.copy_to_device(self.host_shard, destination, "parameters")
            return destination
        buffer, reading = self._read_ahead or (None, FINISHED)
        reading.wait()
        queue = self.host.read_ahead
        if buffer is None:  # all read-ahead buffers were in use
            buffer, queue = self.host.param_staging.acquire(), self.host.param_staging
            self.store.load([buffer.view(self.spec.shard_numel, self.dtype)])
        self.copy = link.copy_to_device(buffer.view(self.spec.shard_numel, self.dtype), destination, "parameters")
        queue.release(buffer, self.copy)
        self._read_ahead = None
        return destination

    def publish_on_device(self, master: Tensor) -> None:
        """Derive a shard on the device from master weights that were updated there."""
        assert self.device_shard is not None
        self.device_shard.copy_(master)
        self.copy, self.is_stale = self.host.link.record_event(), False

    def publish(self, master: Tensor, after: CopyEvent) -> None:
        """Derive the shard from updated master weights: copy it to the device, or keep it for `fetch`."""
        if self.host_shard is not None:
            self.host_shard.copy_(master)
            return
        staging = self.host.param_staging
        buffer = staging.acquire()
        staged = buffer.view(master.numel(), self.dtype)
        staged.copy_(master)
        if self.store is not None:
            self.store.save([staged])
            staging.release(buffer)
            return
        assert self.device_shard is not None
        self.copy = self.host.link.copy_to_device(staged, self.device_shard, "parameters", after=after)
        staging.release(buffer, self.copy)


class OffloadedGrad:
    """A group's gradient on the host: one that arrives early, or a sum over microbatches."""

    def __init__(self, group: ParamGroup, host: OffloadHost, *, sum_dtype: torch.dtype):
        spec, policy = group.spec, group.policy
        self.host, self.dtype, self._label = host, group.grad_dtype, label(spec)
        self.sends_early = policy.grads_are_final(spec) and not policy.params_on_host
        """the gradient is produced once a step and leaves the device as soon as it is reduced"""
        self.buffer: Tensor | None = None
        """None if the update reads the gradient from the device, and for frozen parameters"""
        self.job: JobHandle = FINISHED
        """the worker's last job on it"""
        self._is_empty = True
        self._copy: CopyEvent = COMPLETED
        if not spec.trainable:
            return
        if self.sends_early:
            self.buffer = host.link.empty_pinned(spec.shard_numel, self.dtype)
        elif host.paged and host.updates_on_device:
            self.buffer = host.link.empty_pinned(spec.shard_numel, sum_dtype).zero_()
        elif host.paged:
            self.buffer = torch.zeros(spec.shard_numel, dtype=sum_dtype)

    @property
    def has_grad(self) -> bool:
        """This step's gradient, or a part of its sum, is on the host and not on the device."""
        return self.buffer is not None and not self._is_empty

    def begin_step(self) -> None:
        self._is_empty = True

    def wait(self) -> Tensor:
        """Return the gradient on the host, as it is now."""
        assert self.buffer is not None
        self._copy.synchronize()
        return self.buffer

    def send(self, grad: Tensor) -> None:
        """Copy this step's gradient to the host; the caller may drop it."""
        assert self.buffer is not None
        copy = self._copy = self.host.link.copy_to_host(grad, self.buffer, "gradients")
        self._is_empty = False
        # The job holds the gradient's memory until the copy is complete.
        self.job = self.host.worker.submit(f"the gradient of {self._label}", partial(_wait_holding, copy, grad))

    def add(self, grad: Tensor, before_first: Callable[[], None]) -> None:
        """Copy a microbatch's gradient to the host, whose worker adds it to the sum."""
        total, queue, is_first = self.buffer, self.host.grad_buffers, self._is_empty
        assert total is not None
        self._is_empty = False
        if is_first:
            before_first()
        buffer = queue.acquire()
        received = buffer.view(grad.numel(), grad.dtype)
        copy = self.host.link.copy_to_host(grad, received, "gradients")

        def accumulate(_sent: Tensor = grad) -> None:
            copy.synchronize()
            total.copy_(received) if is_first else total.add_(received)
            queue.release(buffer)

        self.job = self.host.worker.submit(f"the gradient of {self._label}", accumulate)


def _wait_holding(copy: CopyEvent, _sent: Tensor) -> None:
    copy.synchronize()
