"""One flat unit on one rank: its buffers, and the moves between them.

[Note: nothing is copied]

    full       [shards * S]  compute type. The modules' parameters are views of it; all-gather writes straight into it.
    master     [S]           the optimizer's shard (master.py): where `full` stays, its own slice of it is a part of it.
    gradients  [shards * S]  each arriving gradient is written (first) or added (later) into its place, cast on the way
                             to the type in which gradients are reduced.
    grad       [S]           the reduced shard: a slice of `gradients`, or under zero 2 and 3 a buffer of its own.

Views of `full.data`, not of `full`, are what modules hold: `.data` has its own version counter, so refilling the
buffer does not look to autograd like a change of tensors it saved. The storage object survives being freed, so saved
weights are whole again in backward.

[Note: lazy gradients]

When backward begins, every activation is there and no gradient; when it ends, it is the other way round. So on a GPU,
whose memory is short and quickly had, a unit's gradients are made room for when the first of a step arrives, and are
freed when the optimizer has used them. On a CPU fresh memory costs a fault for every page, so there they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from echelon.layout.placement import LogicalParam, ParamGroupSpec
from echelon.memory.offload.host_transfer import CopyEvent
from echelon.parallel.comm.mesh_axis import CompletedWork, MeshAxis, PendingWork
from echelon.parallel.dp.master_weights import MasterWeights, make_master_weights
from echelon.parallel.dp.offloaded_param_group import HostMasterWeights, OffloadedParamGroup, OffloadHost
from echelon.parallel.dp.zero import ShardingPolicy

NORM_CHUNK = 4096
"""elements of a norm that float32 adds up at once, on a CPU"""


class ParamGroup:
    """One unit's buffers on one rank, and the moves between them."""

    def __init__(
        self,
        spec: ParamGroupSpec,
        policy: ShardingPolicy,
        shard_axis: MeshAxis,
        replica_axis: MeshAxis,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        host: OffloadHost | None = None,
    ):
        if spec.keep_fp32:
            compute_dtype, master_dtype, reduce_dtype = (
                torch.promote_types(kind, torch.float32) for kind in (compute_dtype, master_dtype, reduce_dtype)
            )
        self.spec, self.policy, self.shard_axis, self.replica_axis = spec, policy, shard_axis, replica_axis
        size = spec.shard_numel
        self._local_shard = (
            slice(shard_axis.index * size, (shard_axis.index + 1) * size) if policy.num_shards > 1 else slice(0, size)
        )
        self.unsharded_param = torch.zeros(spec.num_shards * size, dtype=compute_dtype, device=device)
        split = compute_dtype == torch.bfloat16 and policy.splits_master_weights(
            compute_bytes=compute_dtype.itemsize, master_bytes=master_dtype.itemsize
        )
        self.grad_dtype = compute_dtype if policy.grads_stay_in_compute_dtype(spec) else reduce_dtype
        own = self.unsharded_param[self._local_shard]
        self.offloaded: OffloadedParamGroup | None = None
        """its states, where they live on the host"""
        if host is not None:
            here = None if policy.params_on_host else own if policy.keeps_param_shard else torch.zeros_like(own)
            self.offloaded = OffloadedParamGroup(
                spec,
                policy,
                host,
                device_shard=here,
                compute_dtype=compute_dtype,
                master_dtype=master_dtype,
                grad_dtype=self.grad_dtype,
                sends_grad_early=policy.grads_are_final(spec) and not policy.params_on_host,
            )
        self.master: MasterWeights | HostMasterWeights = (
            make_master_weights(own, master_dtype, split=split, in_place=policy.keeps_param_shard)
            if self.offloaded is None
            else HostMasterWeights(self.offloaded)
        )
        self.parameters = {entry.name: self._param_view(entry) for entry in spec.params}
        self.version = 0
        """grows whenever the parameters' values change"""
        self._nbytes = self.unsharded_param.untyped_storage().nbytes()
        self.is_unsharded = False
        self._unshard_work: PendingWork | CopyEvent | None = None
        if policy.reshards_params:
            self.unsharded_param.untyped_storage().resize_(0)

        self.lazy_grads = device.type == "cuda"
        """gradients have memory only from the first of a step to `free_gradients`: see the note at the top"""
        self.grad_buffer: Tensor | None = None
        self._grad_shard: Tensor | None = None
        self.grad_scale = 1.0
        """what arriving gradients are multiplied by"""
        self.before_reduce: Callable[[ParamGroup], None] | None = None
        """who looks at this rank's own gradients, just before they are added to those of others"""
        self._written_params: set[str] = set()
        self._grad_views: dict[str, Tensor] = {}
        self._num_ready = 0
        self._num_trainable = sum(entry.trainable for entry in spec.params)
        self._trainable_numel = sum(entry.local_numel for entry in spec.params if entry.trainable)
        self.all_trainable = self._num_trainable == len(spec.params)
        self._has_scattered = False
        self._scattered_grad: Tensor | None = None
        self._sent_grad_buffer: Tensor | None = None
        self._reduce_work: PendingWork = CompletedWork()
        self.early_norm_slices: list[slice] = []
        """parts of the gradient whose norms are taken before it leaves the device"""
        self.early_norms: dict[int, Tensor] = {}
        """those norms, by where the parts begin"""
        if not self.lazy_grads and not policy.params_on_host:
            self.grad.zero_()

    def _param_view(self, param: LogicalParam) -> nn.Parameter:
        offset = self.spec.offsets[param.name]
        data = self.unsharded_param.data[offset : offset + param.local_numel].view(param.local_shape)
        return nn.Parameter(data, requires_grad=param.trainable)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def start_unshard(self, *, wait: bool = False) -> None:
        """With `wait` also where the host is not through with it; ranks that gather together always wait."""
        if self.is_unsharded or self._unshard_work is not None:
            return
        if self.offloaded is not None and self.policy.num_shards == 1 and not wait and not self.offloaded.is_ready():
            return
        if self.policy.reshards_params:
            self.unsharded_param.untyped_storage().resize_(self._nbytes)
        own = self.unsharded_param[self._local_shard]
        part = self.master.param_shard(own)
        coming = CompletedWork() if self.offloaded is None else self.offloaded.param_copy
        if self.policy.num_shards > 1:
            coming.wait()
            self._unshard_work = self.shard_axis.start_all_gather(self.unsharded_param, part)
            return
        if part.data_ptr() != own.data_ptr():
            own.copy_(part)
        self._unshard_work = coming

    def unshard(self) -> None:
        self.start_unshard(wait=True)
        if self._unshard_work is not None:
            self._unshard_work.wait()
            self._unshard_work, self.is_unsharded = None, True

    def reshard(self) -> None:
        self._finish_prefetch()
        if self.policy.reshards_params and self.is_unsharded:
            self.unsharded_param.untyped_storage().resize_(0)
            self.is_unsharded = False

    def _finish_prefetch(self) -> None:
        if self._unshard_work is not None:  # gathered ahead, but its module was not called
            self.unshard()

    def fork_param_buffer(self) -> None:
        """New buffers for the parameters; what was is left to whoever holds it. The master is a shard of its own."""
        assert not self.master.in_place
        self.unsharded_param = torch.empty_like(self.unsharded_param)
        self.parameters = {entry.name: self._param_view(entry) for entry in self.spec.params}
        self.is_unsharded = False
        self.version += 1

    def after_update(self) -> None:
        """The optimizer changed the shard: what others hold of it is old."""
        self._finish_prefetch()
        if self.offloaded is not None:
            self.offloaded.drop_read_ahead()
            self.offloaded.flush()
        self.version += 1
        if self.master.in_place and self.policy.num_shards == 1:
            self.is_unsharded = True
        elif not self.policy.reshards_params:
            self.is_unsharded = False

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor:
        """The reduced shard, as it is now: ask again after every step. Zero where no gradient came."""
        if self.offloaded is not None:
            if self.policy.params_on_host or self.offloaded.has_grad:
                return self.offloaded.wait_grad()
            self.offloaded.update_turn.wait()
        if self._grad_shard is not None:
            return self._grad_shard
        fresh = self.grad_buffer is None or self.policy.reduce_scatter_every_microbatch
        grad = self._get_grad_shard()
        return grad.zero_() if fresh else grad

    def _get_grad_shard(self) -> Tensor:
        if self._grad_shard is None:
            if self.policy.reduce_scatter_every_microbatch:
                size, device = self.spec.shard_numel, self.unsharded_param.device
                self._grad_shard = torch.empty(size, dtype=self.grad_dtype, device=device)
            else:
                self._grad_shard = self._get_grad_buffer()[self._local_shard]
        return self._grad_shard

    def _get_grad_buffer(self) -> Tensor:
        if self.grad_buffer is None:
            self.grad_buffer = torch.empty(
                self.unsharded_param.shape, dtype=self.grad_dtype, device=self.unsharded_param.device
            )
            self.grad_buffer[
                self._trainable_numel :
            ].zero_()  # what is frozen, and padding: nothing else will write there
        return self.grad_buffer

    def free_grads(self) -> None:
        """The optimizer has used them."""
        if self.lazy_grads:
            self.grad_buffer = self._grad_shard = None
            self._grad_views.clear()

    def begin_step(self) -> None:
        if self.offloaded is not None:
            self.offloaded.begin_step()
        self.early_norms.clear()
        self._written_params.clear()
        self._has_scattered = False

    def begin_microbatch(self) -> None:
        self._num_ready = 0

    def accumulate_grad(self, param: LogicalParam, grad: Tensor) -> None:
        """Puts one parameter's gradient into its place."""
        place = self._grad_view(param)
        if param.name in self._written_params:
            place.add_(grad, alpha=self.grad_scale)
        elif self.grad_scale == 1.0:
            place.copy_(grad)
        else:
            place.copy_(grad).mul_(self.grad_scale)
        self._written_params.add(param.name)

    def accumulate_matmul_grad(self, param: LogicalParam, left: Tensor, right: Tensor) -> None:
        """The same for a matrix that is left x right: where types agree the product is made in its place."""
        place = self._grad_view(param)
        if place.dtype != left.dtype:
            self.accumulate_grad(param, left @ right)
            return
        torch.addmm(
            place, left, right, beta=float(param.name in self._written_params), alpha=self.grad_scale, out=place
        )
        self._written_params.add(param.name)

    def claim_grad_view(self, params: Sequence[LogicalParam]) -> Tensor | None:
        """Where the gradients of matrices are to be written, one below the other: they count as written.

        None where that is not all there is to do: they do not lie side by side, some gradient of theirs is there
        already, or it must be cast or multiplied.
        """
        if self.grad_scale != 1.0 or self.grad_dtype != self.unsharded_param.dtype:
            return None
        if len(params) == 1 and params[0].name not in self._written_params:
            self._written_params.add(params[0].name)
            return self._grad_view(params[0])
        start, width = self.spec.offsets[params[0].name], params[0].local_shape[1:]
        end = start
        for entry in params:
            aside = self.spec.offsets[entry.name] != end or entry.local_shape[1:] != width
            if aside or entry.name in self._written_params:
                return None
            end += entry.local_numel
        self._written_params.update(entry.name for entry in params)
        return self._get_grad_buffer()[start:end].view(-1, *width)

    def local_grad(self, param: LogicalParam) -> Tensor:
        """This rank's own, of a parameter, until they are reduced."""
        return self._grad_view(param)

    def _grad_view(self, param: LogicalParam) -> Tensor:
        place = self._grad_views.get(param.name)
        if place is None:
            offset = self.spec.offsets[param.name]
            place = self._get_grad_buffer()[offset : offset + param.local_numel].view(param.local_shape)
            self._grad_views[param.name] = place
        return place

    def mark_param_ready(self) -> bool:
        """A parameter's gradients of this microbatch are all there; true when it was the last parameter."""
        self._num_ready += 1
        return self.grads_ready

    @property
    def grads_ready(self) -> bool:
        return self._num_ready == self._num_trainable

    def start_grad_reduction(self) -> None:
        gradients = self._get_grad_buffer()
        if len(self._written_params) < self._num_trainable:
            for entry in self.spec.params:
                if entry.trainable and entry.name not in self._written_params:
                    self._grad_view(entry).zero_()
        if self.before_reduce is not None:
            self.before_reduce(self)
        if self.policy.params_on_host:
            self._start_host_reduction(gradients)
            return
        grad = self._get_grad_shard()
        if self.policy.reduce_scatter_every_microbatch:
            self._scattered_grad = torch.empty_like(grad) if self._has_scattered else grad
            self._has_scattered = True
            self._reduce_work = self.shard_axis.start_reduce_scatter(self._scattered_grad, gradients)
            # Gradients that arrive while these are on their way go into a buffer of their own.
            self._sent_grad_buffer, self.grad_buffer = gradients, None
            self._grad_views.clear()
            self._written_params.clear()
        elif self.policy.num_shards > 1:
            self._reduce_work = self.shard_axis.start_reduce_scatter(grad, gradients)
        else:
            self._reduce_work = self.replica_axis.start_all_reduce(grad)

    def _start_host_reduction(self, gradients: Tensor) -> None:
        self._scattered_grad = gradients[self._local_shard]
        if self.policy.num_shards > 1:
            self._scattered_grad = torch.empty_like(self._scattered_grad)
            self._reduce_work = self.shard_axis.start_reduce_scatter(self._scattered_grad, gradients)
        self._sent_grad_buffer, self.grad_buffer = gradients, None
        self._grad_views.clear()
        self._written_params.clear()

    def finish_reduce_scatter(self, *, last: bool) -> None:
        """Takes the scattered sum in; in the step's last microbatch the replicas' sum starts."""
        if self.policy.params_on_host:
            self._finish_host_reduction()
            return
        if self.policy.num_shards == 1:
            return
        self._reduce_work.wait()
        self._reduce_work = CompletedWork()
        if self._scattered_grad is not None and self._scattered_grad is not self._grad_shard:
            self.grad.add_(self._scattered_grad)
        self._scattered_grad = self._sent_grad_buffer = None
        if last:
            self._reduce_work = self.replica_axis.start_all_reduce(self.grad)

    def _finish_host_reduction(self) -> None:
        if self._scattered_grad is None:
            return
        assert self.offloaded is not None
        self._reduce_work.wait()
        self._reduce_work = CompletedWork()
        self.replica_axis.all_reduce(self._scattered_grad)
        self.offloaded.add_grad(self._scattered_grad)
        self._scattered_grad = self._sent_grad_buffer = None

    def finish_grad_reduction(self) -> None:
        self._reduce_work.wait()
        self._reduce_work = CompletedWork()
        if self.sends_grad_early and self.offloaded is not None and not self.offloaded.has_grad:
            self.early_norms = {part.start: flat_norm(self.grad[part]) for part in self.early_norm_slices}
            self.offloaded.send_grad(self.grad)
            self.grad_buffer = self._grad_shard = None
            self._grad_views.clear()

    @property
    def sends_grad_early(self) -> bool:
        """Its gradient leaves for the host as soon as it is there."""
        return self.offloaded is not None and self.offloaded.sends_grad_early


def flat_norm(values: Tensor, p: float = 2.0) -> Tensor:
    """Short types are summed in float32 as they are read: no copy of them is made.

    A CPU adds squares up one after another, so that float32 is off by a hundredth after a hundred million: not in rows.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    if values.device.type == "cpu" and dtype == torch.float32 and p == 2.0:
        whole = len(values) // NORM_CHUNK * NORM_CHUNK
        rows = torch.linalg.vector_norm(values[:whole].view(-1, NORM_CHUNK), dim=1, dtype=dtype)
        rest = torch.linalg.vector_norm(values[whole:], dtype=dtype)
        values = torch.cat([rows, rest[None]]).double()
    found: Tensor = torch.linalg.vector_norm(values, p, dtype=torch.promote_types(values.dtype, torch.float32))
    return found.to(dtype)
