"""`OffloadedParamGroup`: the host's side of a parameter group whose states live off the device.

[Note: two sides of a group]

    on the device (ParamGroup)                        on the host (OffloadedParamGroup)
    gradients, accumulated on the device ── copy ──>  the gradient, in a buffer that groups share      (`optimizer`)
    a gradient produced once a step      ── copy ──>  a buffer of its own, as soon as it is reduced    (`optimizer`)
    a gradient of every microbatch       ── copy ──>  added to the sum, by the worker                  (`params`)
                                                      update of master weights and moments, by the worker
    this rank's shard of the parameters  <── copy ──  a cast of the master weights

To an optimizer the host's side looks like a group whose device is the host. During an update only the worker touches
it: every other caller waits first, and the methods here do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.memory.offload.host_worker import FINISHED, JobHandle
from echelon.parallel.dp.master_weights import FULL_SHARD, UnsplitMasterWeights
from echelon.parallel.dp.offload_host import OffloadHost
from echelon.parallel.dp.offloaded_state import OffloadedGrad, OffloadedParams, OffloadedStates, label

if TYPE_CHECKING:
    from echelon.parallel.dp.param_group import ParamGroup


class OffloadedParamGroup:
    """States, parameters and gradient of one group off the device, and the update that is running on them."""

    def __init__(self, group: ParamGroup, host: OffloadHost, master_dtype: torch.dtype):
        self.spec, self.policy, self.host = group.spec, group.policy, host
        local = group.unsharded_param[group.local_slice]
        local = local if self.policy.keeps_param_shard else torch.zeros_like(local)
        device_shard = None if self.policy.params_on_host else local
        self.states = OffloadedStates(self.spec, host, master_dtype)
        self.params = OffloadedParams(self.spec, host, device_shard, local.dtype)
        self.grads = OffloadedGrad(group, host, sum_dtype=master_dtype)
        self.after_update_hooks: list[Callable[[], None]] = []
        """called by the worker after each update of the group"""
        self.update_turn: JobHandle = FINISHED
        """the group's part of the running update"""
        self.update_job: JobHandle = FINISHED
        """the running update of all groups"""

    @property
    def name(self) -> str:
        return label(self.spec)

    @property
    def states_on_disk(self) -> bool:
        """Master weights and optimizer states live on disk: in memory only while they are used."""
        return self.states.store is not None

    # -- as an optimizer sees it --------------------------------------------------------------------------------------

    @property
    def master(self) -> UnsplitMasterWeights:
        return UnsplitMasterWeights(self.states.master, in_place=False)

    @property
    def unsharded_param(self) -> Tensor:
        """A tensor on the device of the update."""
        return self.states.master

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype during an update: the worker has cast a gradient of fewer bits."""
        return self.states.master.dtype

    lazy_grads = True
    grad: Tensor
    """the gradient in the master dtype, during an update"""

    # -- as the master weights of the group on the device (master_weights.py) -----------------------------------------

    in_place = False

    @property
    def dtype(self) -> torch.dtype:
        return self.states.master.dtype

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.states.master,)

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """Return the master weights after the last update; a copy, if they are on disk."""
        self.wait()
        return (self.states.master if self.states.store is None else self.states.read()[0])[part]

    def set_values(self, start: int, values: Tensor) -> None:
        """Set some master weights; call `flush` when all are set."""
        self.wait()
        if self.states.store is not None and not self.params.is_stale:
            self.states.load()
        self.states.allocate()
        self.states.master[start : start + len(values)] = values.to(self.states.master.device)
        self.params.is_stale = True

    def param_shard(self, destination: Tensor) -> Tensor:
        """Return this rank's shard of the parameters on the device, complete when `params.copy` is."""
        self.update_turn.wait()
        self.params.refresh(self.states.master)
        return self.params.fetch(destination)

    # -- for all other callers ----------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until no job is running on the group; raise the error of one that failed."""
        self.update_turn.wait()
        self.update_job.wait()
        self.grads.job.wait()

    def is_ready(self) -> bool:
        """Return whether the updated parameters are in memory; if they are on disk, read them ahead."""
        return self.update_turn.is_done and self.params.is_ready()

    def flush(self) -> None:
        """Write master weights that were set to disk, if they live there."""
        states = self.states
        if states.store is None or not self.params.is_stale:
            return
        self.params.flush(states.master)
        states.save()
        states.store.commit()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Hold the states of a group on disk in memory, to be read and changed."""
        self.wait()
        store = self.states.store
        if store is None:
            yield
            return
        self.states.load()
        try:
            yield
        finally:
            self.states.save()
            store.commit()

    def wait_grad(self) -> Tensor:
        """Return the gradient on the host, as it is now."""
        self.wait()
        return self.grads.wait()

    def send_grad(self, grad: Tensor) -> None:
        """Copy this step's gradient to the host; the caller may drop it."""
        self.update_turn.wait()
        self.grads.send(grad)

    def add_grad(self, grad: Tensor) -> None:
        """Copy a microbatch's gradient to the host, to be added to the sum."""
        self.grads.add(grad, before_first=self.update_turn.wait)
