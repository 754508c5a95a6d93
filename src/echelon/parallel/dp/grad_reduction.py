"""`GradReduction`: how a parameter group's gradients are reduced over shards and replicas, and the reduced shard.

    zero 0       all-reduce over the replicas, in place, once a step
    zero 1       reduce-scatter over the shards into this rank's slice of the buffer, once a step
    zero 2, 3    reduce-scatter every microbatch, added to a shard of its own
    on the host  reduce-scatter every microbatch, then the shard leaves for the host, which accumulates it

HSDP all-reduces the shard over the replicas after the step's last reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.parallel.comm.mesh_axis import CompletedWork, MeshAxis, PendingWork

if TYPE_CHECKING:
    from echelon.parallel.dp.param_group import ParamGroup

NORM_CHUNK = 4096
"""elements whose squares float32 adds up at once, on a CPU"""


class GradReduction:
    """The gradient reduction of one parameter group."""

    def __init__(self, group: ParamGroup, replica_axis: MeshAxis):
        self.buffer, self.policy, self.offloaded = group.grads, group.policy, group.offloaded
        self.shard_axis, self.replica_axis = group.shard_axis, replica_axis
        self._local = group.local_slice
        self.before_reduce: Callable[[ParamGroup], None] | None = None
        """called with the group just before its gradients are reduced"""
        self.early_norm_slices: list[slice] = []
        """slices of the gradient whose norms are computed before it leaves the device"""
        self.early_norms: dict[int, Tensor] = {}
        """those norms, by the start of the slice"""
        self._shard: Tensor | None = None
        self._has_scattered = False
        self._scattered: Tensor | None = None
        self._sent: Tensor | None = None
        self._work: PendingWork = CompletedWork()

    @property
    def grad(self) -> Tensor:
        """The reduced shard, as it is now: read it again after every step. Zero if no gradient arrived."""
        if self.offloaded is not None:
            if self.policy.params_on_host or self.offloaded.grads.has_grad:
                return self.offloaded.wait_grad()
            self.offloaded.update_turn.wait()
        if self._shard is not None:
            return self._shard
        is_fresh = self.buffer.tensor is None or self.policy.reduce_scatter_every_microbatch
        shard = self._allocated_shard()
        return shard.zero_() if is_fresh else shard

    def _allocated_shard(self) -> Tensor:
        if self._shard is None:
            buffer = self.buffer
            if self.policy.reduce_scatter_every_microbatch:
                self._shard = torch.empty(buffer.spec.shard_numel, dtype=buffer.dtype, device=buffer.device)
            else:
                self._shard = buffer.allocated()[self._local]
        return self._shard

    @property
    def has_memory(self) -> bool:
        """Gradients are allocated on the device."""
        return self.buffer.tensor is not None or self._shard is not None

    def free(self) -> None:
        """Free the gradients, which the optimizer has used."""
        if self.buffer.lazy:
            self.buffer.free()
            self._shard = None

    def detach(self) -> tuple[Tensor | None, Tensor | None]:
        """Free the gradients for the group alone: return the buffer and the shard, which live on."""
        tensors = self.buffer.tensor, self._shard
        self.free()
        return tensors

    def attach(self, buffer: Tensor | None, shard: Tensor | None) -> None:
        """Take a buffer and a shard that hold the gradients of a step."""
        self.buffer.tensor, self._shard = buffer, shard

    def begin_step(self) -> None:
        if self.offloaded is not None:
            self.offloaded.grads.begin_step()
        self.early_norms.clear()
        self.buffer.begin_step()
        self._has_scattered = False

    # -- reduction ----------------------------------------------------------------------------------------------------

    def start(self, group: ParamGroup) -> None:
        """Launch the reduction of the buffer; gradients that did not arrive count as zero."""
        self.buffer.allocated()
        self.buffer.zero_missing()
        if self.before_reduce is not None:
            self.before_reduce(group)
        if self.policy.params_on_host:
            self._sent = self.buffer.hand_over()
            self._scattered = self._sent[self._local]
            if self.policy.num_shards > 1:
                self._scattered = torch.empty_like(self._scattered)
                self._work = self.shard_axis.start_reduce_scatter(self._scattered, self._sent)
            return
        shard = self._allocated_shard()
        if self.policy.reduce_scatter_every_microbatch:
            self._scattered = torch.empty_like(shard) if self._has_scattered else shard
            self._has_scattered = True
            self._sent = self.buffer.hand_over()
            self._work = self.shard_axis.start_reduce_scatter(self._scattered, self._sent)
        elif self.policy.num_shards > 1:
            self._work = self.shard_axis.start_reduce_scatter(shard, self.buffer.allocated())
        else:
            self._work = self.replica_axis.start_all_reduce(shard)

    def finish_reduce_scatter(self, *, last: bool) -> None:
        """Accumulate the scattered sum; in the step's last microbatch, launch the replicas' all-reduce."""
        if self.policy.params_on_host:
            if self._scattered is not None:
                assert self.offloaded is not None
                self._wait()
                self.replica_axis.all_reduce(self._scattered)
                self.offloaded.add_grad(self._scattered)
                self._scattered = self._sent = None
        elif self.policy.num_shards > 1:
            self._wait()
            if self._scattered is not None and self._scattered is not self._shard:
                self.grad.add_(self._scattered)
            self._scattered = self._sent = None
            if last:
                self._work = self.replica_axis.start_all_reduce(self.grad)

    def finish(self) -> None:
        """Wait for the reduction; send the gradient to the host if it leaves early."""
        self._wait()
        if self.sends_early and self.offloaded is not None and not self.offloaded.grads.has_grad:
            self.early_norms = {part.start: flat_norm(self.grad[part]) for part in self.early_norm_slices}
            self.offloaded.send_grad(self.grad)
            self.buffer.free()
            self._shard = None

    def _wait(self) -> None:
        self._work.wait()
        self._work = CompletedWork()

    @property
    def sends_early(self) -> bool:
        """The gradient leaves for the host as soon as it is reduced."""
        return self.offloaded is not None and self.offloaded.grads.sends_early


def flat_norm(values: Tensor, p: float = 2.0) -> Tensor:
    """Return the norm of a flat tensor; 16-bit values are summed in float32 as they are read, without a copy.

    A CPU adds squares one after another, so that float32 is off by a hundredth after a hundred million: hence chunks.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    if values.device.type == "cpu" and dtype == torch.float32 and p == 2.0:
        whole = len(values) // NORM_CHUNK * NORM_CHUNK
        chunks = torch.linalg.vector_norm(values[:whole].view(-1, NORM_CHUNK), dim=1, dtype=dtype)
        rest = torch.linalg.vector_norm(values[whole:], dtype=dtype)
        values = torch.cat([chunks, rest[None]]).double()
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.to(dtype)
