"""`ParamGroup`: one parameter group on one rank, its buffers and the moves between them.

[Note: nothing is copied]

    unsharded_param  [shards * S]  compute dtype. The modules' parameters are views of it; all-gather writes into it.
    master           [S]           the optimizer's shard (master_weights.py): if `unsharded_param` stays, its own slice
                                   of it is a part of the master weights.
    grad buffer      [shards * S]  each arriving gradient is written or added into its view, cast to the reduce dtype
                                   (grad_buffer.py).
    grad             [S]           the reduced shard: a slice of the buffer, or under zero 2 and 3 one of its own
                                   (grad_reduction.py).

Modules hold views of `unsharded_param.data`, not of `unsharded_param`: `.data` has its own version counter, so
refilling the buffer does not look to autograd like a change of saved tensors. The storage object survives being freed,
so saved weights are unsharded again in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.layout.placement import LogicalParam, ParamGroupSpec
from echelon.memory.offload.host_transfer import CopyEvent
from echelon.parallel.comm.mesh_axis import CompletedWork, MeshAxes, PendingWork
from echelon.parallel.dp.grad_buffer import GradBuffer
from echelon.parallel.dp.grad_reduction import GradReduction
from echelon.parallel.dp.master_weights import MasterWeights, make_master_weights
from echelon.parallel.dp.offload_host import OffloadHost
from echelon.parallel.dp.offloaded_param_group import OffloadedParamGroup
from echelon.parallel.dp.zero import ShardingPolicy
from echelon.parallel.parallel_options import ParallelOptions


class ParamGroup:
    """Parameters that are unsharded, resharded and reduced together."""

    states_on_disk = False

    def __init__(
        self,
        spec: ParamGroupSpec,
        policy: ShardingPolicy,
        axes: MeshAxes,
        options: ParallelOptions,
        host: OffloadHost | None,
    ):
        compute, master, reduce = (
            torch.promote_types(dtype, torch.float32) if spec.keep_fp32 else dtype
            for dtype in (options.compute_dtype, options.master_dtype, options.grad_dtype)
        )
        master = master if spec.trainable else compute  # frozen parameters are never updated
        self.spec, self.policy, self.shard_axis = spec, policy, axes.get_or_add(policy.shard_axis)
        size, start = spec.shard_numel, self.shard_axis.index * spec.shard_numel if policy.num_shards > 1 else 0
        self.local_slice = slice(start, start + size)
        """this rank's shard in the unsharded buffers"""
        self.unsharded_param = torch.zeros(spec.num_shards * size, dtype=compute, device=options.device)
        self.grad_dtype = compute if policy.grads_stay_in_compute_dtype(spec) else reduce
        self.offloaded = OffloadedParamGroup(self, host, master) if host is not None else None
        """its states, if they live on the host"""
        self.master = self.offloaded or self._make_master(compute, master)
        self.parameters = {param.name: self._param_view(param) for param in spec.params}
        self.version = 0
        """grows whenever the parameters' values change"""
        self.is_unsharded = False
        self.backward_has_passed = False
        """of a frozen group: the current microbatch's backward has left its module"""
        self.num_calls_in_forward = 0
        """of a frozen group: calls of its module that backward has yet to leave; a layer may be called several times"""
        self._nbytes = self.unsharded_param.untyped_storage().nbytes()
        self._unshard_work: PendingWork | CopyEvent | None = None
        if policy.reshards_params:
            self.unsharded_param.untyped_storage().resize_(0)
        self.grads = GradBuffer(spec, self.grad_dtype, self.unsharded_param)
        self.reduction = GradReduction(self, axes.get_or_add(policy.replica_axis))
        if spec.trainable and not self.grads.lazy and not policy.params_on_host:
            self.grad.zero_()

    def _make_master(self, compute: torch.dtype, master: torch.dtype) -> MasterWeights:
        splits = self.policy.splits_master_weights(compute_bytes=compute.itemsize, master_bytes=master.itemsize)
        split = compute == torch.bfloat16 and splits
        local = self.unsharded_param[self.local_slice]
        return make_master_weights(local, master, split=split, in_place=self.policy.keeps_param_shard)

    def _param_view(self, param: LogicalParam) -> nn.Parameter:
        offset = self.spec.offsets[param.name]
        data = self.unsharded_param.data[offset : offset + param.local_numel].view(param.local_shape)
        return nn.Parameter(data, requires_grad=param.trainable)

    # -- unshard and reshard ------------------------------------------------------------------------------------------

    def start_unshard(self, *, wait: bool = False) -> None:
        """Launch the all-gather, or the copy from the host.

        `wait` also for the host's update of the group; ranks that gather together always wait for it.
        """
        if self.is_unsharded or self._unshard_work is not None:
            return
        if self.offloaded is not None and self.policy.num_shards == 1 and not wait and not self.offloaded.is_ready():
            return
        if self.policy.reshards_params:
            self.unsharded_param.untyped_storage().resize_(self._nbytes)
        local = self.unsharded_param[self.local_slice]
        shard = self.master.param_shard(local)
        copy = CompletedWork() if self.offloaded is None else self.offloaded.params.copy
        if self.policy.num_shards > 1:
            copy.wait()
            self._unshard_work = self.shard_axis.start_all_gather(self.unsharded_param, shard)
            return
        if shard.data_ptr() != local.data_ptr():
            local.copy_(shard)
        self._unshard_work = copy

    def unshard(self) -> None:
        """Make the parameters unsharded, and wait for it."""
        self.start_unshard(wait=True)
        if self._unshard_work is not None:
            self._unshard_work.wait()
            self._unshard_work, self.is_unsharded = None, True

    def reshard(self) -> None:
        """Free the unsharded parameters, under a policy that reshards them."""
        self._finish_prefetch()
        if self.policy.reshards_params and self.is_unsharded:
            self.unsharded_param.untyped_storage().resize_(0)
            self.is_unsharded = False

    def _finish_prefetch(self) -> None:
        if self._unshard_work is not None:  # prefetched, but its module was not called
            self.unshard()

    def fork_param_buffer(self) -> None:
        """Allocate new buffers for the parameters; their users keep the old ones. The master is a shard of its own."""
        assert not self.master.in_place
        self.unsharded_param = torch.empty_like(self.unsharded_param)
        self.parameters = {param.name: self._param_view(param) for param in self.spec.params}
        self.is_unsharded = False
        self.version += 1

    def after_update(self) -> None:
        """Note that the optimizer has changed the shard: the unsharded parameters are stale."""
        self._finish_prefetch()
        if self.offloaded is not None:
            self.offloaded.params.drop_read_ahead()
            self.offloaded.flush()
        self.version += 1
        if self.master.in_place and self.policy.num_shards == 1:
            self.is_unsharded = True
        elif not self.policy.reshards_params:
            self.is_unsharded = False

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor:
        """The reduced shard (grad_reduction.py)."""
        return self.reduction.grad

    @property
    def lazy_grads(self) -> bool:
        """Gradients are allocated only from the first of a step to `free_grads` (grad_buffer.py)."""
        return self.grads.lazy

    def free_grads(self) -> None:
        """Free the gradients, which the optimizer has used."""
        self.reduction.free()

    @property
    def is_backward_done(self) -> bool:
        """The current microbatch's backward needs the group no more."""
        return self.grads.is_ready if self.spec.trainable else self.backward_has_passed

    def begin_microbatch(self) -> None:
        self.backward_has_passed, self.num_calls_in_forward = False, 0
        self.grads.begin_microbatch()
