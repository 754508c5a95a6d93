"""The update on the host, beside the device's work (ZeRO-Offload), and both updates as one.

[Note: a step's update]

    device   ... last backward | norm | forward 0 | forward 1 | forward 2 | ...
    host                              | update 0 | update 1 | update 2 | ...        a worker's thread (memory/offload/host_worker.py)
    down                       | gradient 0 | 1 | 2 | ...
    up                                          | values 0 | 1 | 2 | ...

`step` only hands the work over: nobody waits for the device. The worker reads the norm's factor when the device has it,
then takes units in the order in which the next forward needs them. While one is updated the next one's gradient comes
down and the last one's values go up. A unit's forward waits for that unit alone (parallel/dp/offloaded_param_group.py).

Gradients that lie on the device in the masters' type are multiplied by the factor there, on their way down. Shorter
ones are made longer on the host first: what divides by a loss scale and a number of targets may be zero in their type.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.memory.offload.disk_store import DiskError, DiskStore
from echelon.memory.offload.host_transfer import CopyEvent, HostBuffer
from echelon.memory.offload.host_worker import FINISHED, JobHandle
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState
from echelon.parallel.dp.offloaded_param_group import OffloadedParamGroup
from echelon.parallel.dp.param_group import ParamGroup

ONE = torch.ones((), dtype=torch.float64)
TRUE = torch.ones((), dtype=torch.bool)


@dataclass
class _PendingUpdate:
    """One unit's part in a step."""

    host_group: OffloadedParamGroup
    optimizer: ShardedOptimizer
    gradient: Tensor | None
    """on the device; none where it has come already"""
    factor: Tensor | None
    """what a gradient on the device is multiplied by on its way; none where the host multiplies it"""
    handle: JobHandle
    buffer: HostBuffer | None = None
    copy: CopyEvent | None = None
    read_handle: JobHandle = FINISHED
    write_handle: JobHandle = FINISHED


class HostOptimizer:
    """The updates of units whose states live on the host, each by itself."""

    def __init__(
        self,
        units: Sequence[ParamGroup],
        make: Callable[[OffloadedParamGroup], ShardedOptimizer],
        state_bytes: Callable[[OffloadedParamGroup], int],
    ):
        """`state_bytes` is what the rule keeps of a unit."""
        # What is whole from the start of the model is needed first, then the layers in the order of forward.
        self._param_groups = sorted(units, key=lambda unit: not unit.spec.stays_unsharded)
        self._host_groups = [unit.offloaded for unit in self._param_groups if unit.offloaded is not None]
        self._optimizers: list[ShardedOptimizer] = []
        for host in self._host_groups:
            host.allocate()  # its parts are looked at, not their values
            self._optimizers.append(make(host))
            host.free_memory()
            host.optimizer_states = partial(
                _element_states, weakref.ref(self._optimizers[-1])
            )  # or they would hold each other
        _reserve_disk(self._host_groups, state_bytes)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        due = []
        for unit, update in zip(self._param_groups, self._optimizers, strict=True):
            host = unit.offloaded
            assert host is not None
            host.update_job.wait()
            gradient = None if host.host_grad is not None else unit.grad
            # Made here: what the worker would give the device comes after what this thread gives it.
            factor = grad_scale.to(host.received_dtype) if host.received_dtype == host.master_shard.dtype else None
            due.append(_PendingUpdate(host, update, gradient, factor, JobHandle(f"the update of {host.name}")))
        shared = due[0].host_group.host
        told, mark = (
            shared.link.read_async(torch.stack([grad_scale, do_update.to(grad_scale.dtype)])),
            shared.link.record_event(),
        )
        for one in due:
            one.host_group.update_turn = one.handle
        job = shared.worker.submit("the update", lambda: _run_updates(due, lr, told, mark))
        for one in due:
            one.host_group.update_job = job

    def states(self) -> list[Tensor]:
        """On the host."""
        found: list[Tensor] = []
        for host, update in zip(self._host_groups, self._optimizers, strict=True):
            host.wait()
            states = update.states()
            if host.store is not None:
                copies = iter(host.read_store()[1:])
                states = [state if state.dim() == 0 else next(copies) for state in states]
            found += states
        return found

    def named_states(self) -> Iterator[OptimizerState]:
        """On the host; those of a unit on disk are in memory until the next unit's are asked for."""
        for host, update in zip(self._host_groups, self._optimizers, strict=True):
            with host.in_memory():
                yield from update.named_states()

    def collectives(self) -> list[Collective]:
        """Rules that would send something are refused (hosted.py)."""
        return []


def _element_states(update: weakref.ref[ShardedOptimizer]) -> list[Tensor]:
    """What it keeps, without counts."""
    found = update()
    return [] if found is None else [state for state in found.states() if state.dim() > 0]


def _reserve_disk(hosts: Sequence[OffloadedParamGroup], state_bytes: Callable[[OffloadedParamGroup], int]) -> None:
    """Room on disk for everything that will be there: a disk that is too small is found now."""
    disk = hosts[0].host.disk if hosts else None
    if disk is None:
        return
    needed = {host: host.spec.shard_numel * host.master_shard.itemsize + state_bytes(host) for host in hosts}
    try:
        disk.check_free_space(
            2 * sum(needed.values()) - 2 * sum(host.store.reserved for host in hosts if host.store is not None)
        )
        for host, nbytes in needed.items():
            assert host.store is not None
            host.store.reserve(nbytes)
    except DiskError:
        disk.close()  # what was reserved is free for somebody else
        raise


def _run_updates(due: list[_PendingUpdate], lr: float, told: Callable[[], list[float]], mark: CopyEvent) -> None:
    """The worker's part."""
    try:
        factor, live = told()
        if live:
            _start_fetch(due[0], mark)
            for place, one in enumerate(due):
                if place >= 2:
                    due[place - 2].write_handle.wait()  # memory for three units: one comes, one is here, one goes
                if place + 1 < len(due):
                    _start_fetch(due[place + 1], mark)
                _update_group(one, lr, torch.tensor(factor, dtype=torch.float64), mark)
                one.handle.finish()
        _commit(due)
        for one in due:
            one.handle.finish()
    except BaseException as error:
        _roll_back(due, error)
        for one in due:
            if not one.handle.is_done:
                one.handle.finish(error)
        raise


def _start_fetch(one: _PendingUpdate, mark: CopyEvent) -> None:
    """The gradient comes down, and from disk what is updated."""
    if (disk := one.host_group.host.disk) is not None:
        one.read_handle = disk.reader.submit(f"reading {one.host_group.name}", one.host_group.load_store)
    if one.gradient is not None:
        rooms, gradient = one.host_group.host.grad_buffers, one.gradient
        one.buffer = rooms.acquire()
        there = one.buffer.view(gradient.numel(), gradient.dtype)
        one.copy = one.host_group.host.link.copy_to_host(gradient, there, "gradients", after=mark, factor=one.factor)


def _update_group(one: _PendingUpdate, lr: float, factor: Tensor, mark: CopyEvent) -> None:
    unit = one.host_group
    if one.gradient is not None:
        assert one.buffer is not None
        assert one.copy is not None
        one.copy.synchronize()
        found = one.buffer.view(one.gradient.numel(), one.gradient.dtype)
        one.gradient, factor = None, factor if one.factor is None else ONE
    else:
        assert unit.host_grad is not None
        found = unit.host_grad
    if found.dtype != unit.master_shard.dtype:  # it came no longer than it was
        short, one.buffer = one.buffer, unit.host.grad_buffers.acquire()
        found = one.buffer.view(found.numel(), unit.master_shard.dtype).copy_(found)
        if short is not None:
            unit.host.grad_buffers.release(short)
    unit.grad = found
    one.read_handle.wait()
    one.optimizer.step(lr, factor, TRUE)
    unit.run_after_update_hooks()
    del unit.grad
    if one.buffer is not None:
        unit.host.grad_buffers.release(one.buffer)
    unit.publish_params(mark)
    if unit.host.disk is not None:
        one.write_handle = unit.host.disk.writer.submit(f"writing {unit.name}", unit.save_store)


def _commit(due: list[_PendingUpdate]) -> None:
    """When all is written, all of it counts."""
    for one in due:
        one.write_handle.wait()
    for store in _stores(due):
        store.commit()


def _roll_back(due: list[_PendingUpdate], error: BaseException) -> None:
    """On disk, the step before is what there is."""
    if (disk := due[0].host_group.host.disk) is None:
        return
    disk.errors.append(error)
    for one in due:
        with suppress(Exception):
            one.write_handle.wait()
    for store in _stores(due):
        store.roll_back()


def _stores(due: list[_PendingUpdate]) -> list[DiskStore]:
    return [store for one in due for store in (one.host_group.store, one.host_group.param_store) if store is not None]


class DeviceAndHostOptimizer:
    """The device's units, and the host's beside them."""

    def __init__(self, device: ShardedOptimizer, host: HostOptimizer):
        self._device, self._host = device, host

    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._host.step(lr, grad_scale, do_update)
        self._device.step(lr, grad_scale, do_update)

    def states(self) -> list[Tensor]:
        return [*self._device.states(), *self._host.states()]

    def named_states(self) -> Iterator[OptimizerState]:
        yield from self._device.named_states()
        yield from self._host.named_states()

    def collectives(self) -> list[Collective]:
        return [*self._device.collectives(), *self._host.collectives()]
