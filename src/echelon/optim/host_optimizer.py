"""Optimizer on the host, concurrent with the device's work (ZeRO-Offload).

[Note: a step's update]

    device   ... last backward | norm | forward 0 | forward 1 | forward 2 | ...
    host                              | update 0 | update 1 | update 2 | ...        a worker thread (host_worker.py)
    to host                    | gradient 0 | 1 | 2 | ...
    to device                                   | weights 0 | 1 | 2 | ...

`step` only submits the work: the training thread does not wait for the device. The worker reads the norm's factor when
the device has it, then updates parameter groups in the order in which the next forward needs them. While one is
updated, the next one's gradient is copied to the host and the last one's weights to the device. A group's forward waits
for that group alone (parallel/dp/offloaded_param_group.py).

Gradients on the device in the master weights' dtype are multiplied by the factor before the copy. Shorter ones are
converted on the host first: the factor, which divides by a loss scale and a number of targets, may underflow in their
dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.memory.offload.host_transfer import CopyEvent, HostBuffer
from echelon.memory.offload.host_worker import FINISHED, JobHandle
from echelon.optim import state_generations
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState
from echelon.parallel.dp.offloaded_param_group import OffloadedParamGroup
from echelon.parallel.dp.param_group import ParamGroup

ONE = torch.ones((), dtype=torch.float64)
TRUE = torch.ones((), dtype=torch.bool)


@dataclass
class _PendingUpdate:
    """One parameter group's update in a step."""

    host_group: OffloadedParamGroup
    optimizer: ShardedOptimizer
    gradient: Tensor | None
    """on the device; None where it is on the host already"""
    factor: Tensor | None
    """multiplies a gradient on the device before its copy; None where the host multiplies"""
    handle: JobHandle
    buffer: HostBuffer | None = None
    copy: CopyEvent | None = None
    read_handle: JobHandle = FINISHED
    write_handle: JobHandle = FINISHED


class HostOptimizer(ShardedOptimizer):
    """Updates parameter groups whose optimizer states are on the host, one at a time.

    It has no collectives: rules that need them update on the device (paged_optimizer.py).
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        build: Callable[[OffloadedParamGroup], ShardedOptimizer],
        state_bytes: Callable[[OffloadedParamGroup], int],
    ):
        """`build` makes a group's optimizer, and `state_bytes` returns the size of its states."""
        # The next forward needs groups that stay unsharded first, then the layers in order.
        self._param_groups = sorted(param_groups, key=lambda group: not group.spec.stays_unsharded)
        self._host_groups = [group.offloaded for group in self._param_groups if group.offloaded is not None]
        self._optimizers: list[ShardedOptimizer] = []
        for group in self._host_groups:
            group.states.allocate()  # the optimizer views its tensors, not their values
            self._optimizers.append(build(group))
            group.states.free()
            # A weak reference: group and optimizer would keep each other alive.
            group.states.optimizer_states = partial(_element_states, weakref.ref(self._optimizers[-1]))
        state_generations.reserve_disk(self._host_groups, state_bytes)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        updates = []
        for param_group, optimizer in zip(self._param_groups, self._optimizers, strict=True):
            group = param_group.offloaded
            assert group is not None
            group.update_job.wait()
            gradient = None if group.grads.buffer is not None else param_group.grad
            # Cast here: what the worker queued on the device would run after what this thread queues.
            factor = grad_scale.to(group.grads.dtype) if group.grads.dtype == group.states.master.dtype else None
            updates.append(_PendingUpdate(group, optimizer, gradient, factor, JobHandle(f"the update of {group.name}")))
        host = updates[0].host_group.host
        read_scalars = host.link.read_async(torch.stack([grad_scale, do_update.to(grad_scale.dtype)]))
        ready = host.link.record_event()
        for update in updates:
            update.host_group.update_turn = update.handle
        job = host.worker.submit("the update", lambda: _run_updates(updates, lr, read_scalars, ready))
        for update in updates:
            update.host_group.update_job = job

    def states(self) -> list[Tensor]:
        states: list[Tensor] = []
        for group, optimizer in zip(self._host_groups, self._optimizers, strict=True):
            group.wait()
            group_states = optimizer.states()
            if group.states.store is not None:
                copies = iter(group.states.read()[1:])
                group_states = [state if state.dim() == 0 else next(copies) for state in group_states]
            states += group_states
        return states

    def named_states(self) -> Iterator[OptimizerState]:
        """Yield the states; those of a group on disk are in memory until the next group's are read."""
        for group, optimizer in zip(self._host_groups, self._optimizers, strict=True):
            with group.in_memory():
                yield from optimizer.named_states()


def _element_states(optimizer: weakref.ref[ShardedOptimizer]) -> list[Tensor]:
    """Return an optimizer's states without step counts."""
    alive = optimizer()
    return [] if alive is None else [state for state in alive.states() if state.dim() > 0]


def _run_updates(
    updates: list[_PendingUpdate], lr: float, read_scalars: Callable[[], list[float]], ready: CopyEvent
) -> None:
    """Run a step's updates in the worker thread."""
    try:
        factor, do_update = read_scalars()
        if do_update:
            _start_prefetch(updates[0], ready)
            for index, update in enumerate(updates):
                if index >= 2:  # memory for three groups: one read, one updated, one written
                    updates[index - 2].write_handle.wait()
                if index + 1 < len(updates):
                    _start_prefetch(updates[index + 1], ready)
                _update_group(update, lr, torch.tensor(factor, dtype=torch.float64), ready)
                update.handle.finish()
        for update in updates:
            update.write_handle.wait()
        state_generations.commit([update.host_group for update in updates])
        for update in updates:
            update.handle.finish()
    except BaseException as error:
        for update in updates:
            with suppress(Exception):
                update.write_handle.wait()
        state_generations.roll_back([update.host_group for update in updates], error)
        for update in updates:
            if not update.handle.is_done:
                update.handle.finish(error)
        raise


def _start_prefetch(update: _PendingUpdate, ready: CopyEvent) -> None:
    """Prefetch for a group's update: copy its gradient to the host, and read its states from disk."""
    group = update.host_group
    if (disk := group.host.disk) is not None:
        update.read_handle = disk.reader.submit(f"reading {group.name}", group.states.load)
    if (gradient := update.gradient) is not None:
        update.buffer = group.host.grad_buffers.acquire()
        target = update.buffer.view(gradient.numel(), gradient.dtype)
        update.copy = group.host.link.copy_to_host(gradient, target, "gradients", after=ready, factor=update.factor)


def _update_group(update: _PendingUpdate, lr: float, factor: Tensor, ready: CopyEvent) -> None:
    group = update.host_group
    if update.gradient is not None:
        assert update.buffer is not None
        assert update.copy is not None
        update.copy.synchronize()
        gradient = update.buffer.view(update.gradient.numel(), update.gradient.dtype)
        update.gradient, factor = None, factor if update.factor is None else ONE
    else:
        assert group.grads.buffer is not None
        gradient = group.grads.buffer
    if gradient.dtype != group.states.master.dtype:  # it was copied in its own, shorter dtype
        short, update.buffer = update.buffer, group.host.grad_buffers.acquire()
        gradient = update.buffer.view(gradient.numel(), group.states.master.dtype).copy_(gradient)
        if short is not None:
            group.host.grad_buffers.release(short)
    group.grad = gradient
    update.read_handle.wait()
    update.optimizer.step(lr, factor, TRUE)
    for hook in group.after_update_hooks:
        hook()
    del group.grad
    if update.buffer is not None:
        group.host.grad_buffers.release(update.buffer)
    group.params.publish(group.states.master, ready)
    if group.host.disk is not None:
        update.write_handle = group.host.disk.writer.submit(f"writing {group.name}", group.states.save)
