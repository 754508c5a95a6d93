"""States on the host, updates on the device: for rules that need statistics of full matrices.

[Note: pages]

LAMB, Adafactor and SM3 reduce over the ranks that share a matrix, and Muon multiplies full matrices, which takes a CPU
minutes. So their states pass through the device, page by page:

    to device   | states 0 | states 1 | states 2 | ...
    device                 | update 0 | update 1 | update 2 | ... | forward of the next step
    to host                           | states 0 | states 1 | ...

A page is the states of neighbouring parameter groups, up to `PAGE_BYTES`: collectives are of a page, and Muon's owners
share its matrices. Three pages are on the device at once: one that arrives, one that is updated, one that leaves. The
training thread queues all of it, because collectives have one order on all ranks. It waits for the page before the last
one to leave, and for the disk. A worker thread does what is left on the host: averages, paged parameters, files.

Weights and gradients are what they are without offload, and the update is the same kernels on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.memory.offload.cost import PAGE_BYTES, split_into_pages
from echelon.memory.offload.host_transfer import COMPLETED, CopyEvent
from echelon.memory.offload.host_worker import FINISHED, JobHandle
from echelon.optim import state_generations
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState
from echelon.parallel.dp.offloaded_param_group import OffloadedParamGroup
from echelon.parallel.dp.param_group import ParamGroup

BuildOptimizer = Callable[[Sequence[OffloadedParamGroup]], ShardedOptimizer]


@dataclass(eq=False)
class _StatePage:
    """Parameter groups whose states are on the device together; the first one's file has the optimizer's states."""

    param_groups: Sequence[ParamGroup]
    optimizer: ShardedOptimizer = field(init=False)
    arrival: CopyEvent = COMPLETED
    read_job: JobHandle = FINISHED
    leave_job: JobHandle = FINISHED

    @property
    def host_groups(self) -> list[OffloadedParamGroup]:
        return [group.offloaded for group in self.param_groups if group.offloaded is not None]

    def build(self, build: BuildOptimizer) -> None:
        """Build the optimizer while the master weights are on the device, where it allocates its states."""
        for group in self.host_groups:
            group.states.optimizer_states = list  # without those of an earlier optimizer
            group.states.allocate()
            group.states.fetch().wait()  # before the copy back, which waits for the compute stream
        self.optimizer = build(self.host_groups)
        list(self.optimizer.named_states())  # allocates them
        # A weak reference: group and optimizer would keep each other alive.
        self.host_groups[0].states.optimizer_states = partial(_stored_states, weakref.ref(self.optimizer))
        for group in self.host_groups:
            copy, _device_memory = group.states.evict()
            copy.synchronize()
            group.states.free()

    def start_read(self) -> None:
        """Start reading the states from disk."""
        if (disk := self.host_groups[0].host.disk) is not None:
            self.read_job = disk.reader.submit(f"reading {self.host_groups[0].name}", self._load)

    def _load(self) -> None:
        for group in self.host_groups:
            group.states.load()

    def fetch(self) -> None:
        """Start copying states, and gradients that are on the host, to the device."""
        self.read_job.wait()
        for param_group, group in zip(self.param_groups, self.host_groups, strict=True):
            gradient, link = param_group.grad, group.host.link
            if group.grads.buffer is None:
                group.grad = gradient
            else:
                group.grad = torch.empty(gradient.shape, dtype=gradient.dtype, device=link.device)
                link.copy_to_device(gradient, group.grad, "gradients")
            self.arrival = group.states.fetch()

    def leave(self, do_update: Callable[[], list[float]], step_groups: Sequence[OffloadedParamGroup]) -> None:
        """Derive the parameters that stay on the device, and start copying the states to the host."""
        device_memory: list[Tensor] = []
        copy, ready = COMPLETED, self.host_groups[0].host.link.record_event()
        for group in self.host_groups:
            del group.grad
            if group.params.device_shard is not None:
                group.params.publish_on_device(group.states.master)
            copy, memory = group.states.evict()
            device_memory += memory

        def finish() -> None:
            with state_generations.rolled_back_on_error(step_groups):
                self._finish(copy, device_memory, do_update, ready)

        self.leave_job = self.host_groups[0].host.worker.submit(f"the update of {self.host_groups[0].name}", finish)
        for group in self.host_groups:
            # Parameters on the device need not wait for the host.
            group.update_turn = self.leave_job if group.params.device_shard is None else FINISHED

    def _finish(
        self, copy: CopyEvent, device_memory: list[Tensor], do_update: Callable[[], list[float]], ready: CopyEvent
    ) -> None:
        """Finish the update on the host, in the worker thread."""
        copy.synchronize()
        device_memory.clear()
        for group in self.host_groups:
            for hook in group.after_update_hooks if do_update()[0] else ():
                hook()
            if group.params.device_shard is None:
                group.params.publish(group.states.master, ready)
            if group.states.store is not None:
                group.states.save()


class PagedOptimizer(ShardedOptimizer):
    """Updates on the device parameter groups whose states are on the host: see [Note: pages]."""

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        build: BuildOptimizer,
        state_bytes: Callable[[OffloadedParamGroup], int],
        bytes_per_element: float,
    ):
        """`build` makes the optimizer of some groups, and `state_bytes` returns the size of a group's states.

        `bytes_per_element` of states divide the groups into pages, alike on all ranks: their own pieces differ.
        """
        # The next forward needs groups that stay unsharded first, then the layers in order.
        ordered = sorted(param_groups, key=lambda group: not group.spec.stays_unsharded)
        hosts = [group.offloaded for group in ordered if group.offloaded is not None]
        sizes = [round(group.spec.shard_numel * (group.dtype.itemsize + bytes_per_element)) for group in hosts]
        self._pages = [_StatePage(ordered[part]) for part in split_into_pages(sizes, PAGE_BYTES)]
        for page in self._pages:
            page.build(build)
        self._groups, self._host = hosts, hosts[0].host
        in_first = {page.host_groups[0]: sum(map(state_bytes, page.host_groups)) for page in self._pages}
        state_generations.reserve_disk(hosts, lambda group: in_first.get(group, 0))

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        for group in self._groups:
            group.update_job.wait()
        with state_generations.rolled_back_on_error(self._groups):
            self._update_pages(lr, grad_scale, do_update)
        job = self._host.worker.submit("the update", partial(state_generations.commit, self._groups))
        for group in self._groups:
            group.update_job = job

    def _update_pages(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        """Update page after page of offloaded states, and prefetch the next one meanwhile."""
        do_host_update, pages = self._host.link.read_async(do_update.double()[None]), self._pages
        pages[0].start_read()
        pages[0].fetch()
        for index, page in enumerate(pages):
            if index >= 2:
                pages[index - 2].leave_job.wait()
            if index + 1 < len(pages):
                pages[index + 1].start_read()
                pages[index + 1].fetch()
            page.arrival.wait()
            page.optimizer.step(lr, grad_scale, do_update)
            page.leave(do_host_update, self._groups)

    def states(self) -> list[Tensor]:
        states: list[Tensor] = []
        for page in self._pages:
            first = page.host_groups[0]
            first.wait()
            page_states = page.optimizer.states()
            if first.states.store is not None:
                copies = iter(first.states.read()[1:])
                page_states = [state if state.dim() == 0 else next(copies) for state in page_states]
            states += page_states
        return states

    def named_states(self) -> Iterator[OptimizerState]:
        """Yield the states; those of a page on disk are in memory until the next page's are read."""
        for page in self._pages:
            with ExitStack() as stack:
                for group in page.host_groups:
                    stack.enter_context(group.in_memory())
                yield from page.optimizer.named_states()

    def collectives(self) -> list[Collective]:
        return [collective for page in self._pages for collective in page.optimizer.collectives()]


def _stored_states(optimizer: weakref.ref[ShardedOptimizer]) -> list[Tensor]:
    """Return an optimizer's states without step counts."""
    alive = optimizer()
    return [] if alive is None else [state for state in alive.states() if state.dim() > 0]
