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

from echelon.layout.placement import Entry, Unit
from echelon.memory.offload.host_transfer import Moving
from echelon.parallel.comm.mesh_axis import Axis, Done, Pending
from echelon.parallel.dp.master_weights import Master, master_of
from echelon.parallel.dp.offloaded_param_group import Host, HostMaster, HostUnit
from echelon.parallel.dp.zero import Policy

ROW = 4096
"""elements of a norm that float32 adds up at once, on a CPU"""


class FlatUnit:
    """One unit's buffers on one rank, and the moves between them."""

    def __init__(
        self,
        unit: Unit,
        policy: Policy,
        shard: Axis,
        replica: Axis,
        *,
        device: torch.device,
        compute: torch.dtype,
        master: torch.dtype,
        reduce: torch.dtype,
        host: Host | None = None,
    ):
        if unit.wide:
            compute, master, reduce = (torch.promote_types(kind, torch.float32) for kind in (compute, master, reduce))
        self.unit, self.policy, self.shard, self.replica = unit, policy, shard, replica
        size = unit.shard_numel
        self._own = slice(shard.index * size, (shard.index + 1) * size) if policy.shards > 1 else slice(0, size)
        self.full = torch.zeros(unit.shards * size, dtype=compute, device=device)
        split = compute == torch.bfloat16 and policy.splits_master(
            compute_bytes=compute.itemsize, master_bytes=master.itemsize
        )
        self.gradient_type = compute if policy.gradients_stay_short(unit) else reduce
        own = self.full[self._own]
        self.host: HostUnit | None = None
        """its states, where they live on the host"""
        if host is not None:
            here = None if policy.paged else own if policy.stays else torch.zeros_like(own)
            self.host = HostUnit(
                unit,
                policy,
                host,
                here=here,
                compute=compute,
                master=master,
                gradient_type=self.gradient_type,
                early=policy.gradients_are_final(unit) and not policy.paged,
            )
        self.master: Master | HostMaster = (
            master_of(own, master, split=split, in_place=policy.stays) if self.host is None else HostMaster(self.host)
        )
        self.parameters = {entry.name: self._view(entry) for entry in unit.entries}
        self.version = 0
        """grows whenever the parameters' values change"""
        self._nbytes = self.full.untyped_storage().nbytes()
        self.whole = False
        self._gathering: Pending | Moving | None = None
        if policy.free_parameters:
            self.full.untyped_storage().resize_(0)

        self.lazy = device.type == "cuda"
        """gradients have memory only from the first of a step to `free_gradients`: see the note at the top"""
        self.gradients: Tensor | None = None
        self._grad: Tensor | None = None
        self.scale = 1.0
        """what arriving gradients are multiplied by"""
        self.on_reduce: Callable[[FlatUnit], None] | None = None
        """who looks at this rank's own gradients, just before they are added to those of others"""
        self._written: set[str] = set()
        self._places: dict[str, Tensor] = {}
        self._arrived = 0
        self._expected = sum(entry.trainable for entry in unit.entries)
        self._trainable = sum(entry.local_numel for entry in unit.entries if entry.trainable)
        self.all_trainable = self._expected == len(unit.entries)
        self._scattered_before = False
        self._incoming: Tensor | None = None
        self._sending: Tensor | None = None
        self._reducing: Pending = Done()
        self.norm_runs: list[slice] = []
        """parts of the gradient whose norms are taken before it leaves the device"""
        self.norms: dict[int, Tensor] = {}
        """those norms, by where the parts begin"""
        if not self.lazy and not policy.paged:
            self.grad.zero_()

    def _view(self, entry: Entry) -> nn.Parameter:
        offset = self.unit.offsets[entry.name]
        data = self.full.data[offset : offset + entry.local_numel].view(entry.local_shape)
        return nn.Parameter(data, requires_grad=entry.trainable)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def start_gather(self, *, wait: bool = False) -> None:
        """With `wait` also where the host is not through with it; ranks that gather together always wait."""
        if self.whole or self._gathering is not None:
            return
        if self.host is not None and self.policy.shards == 1 and not wait and not self.host.is_ready():
            return
        if self.policy.free_parameters:
            self.full.untyped_storage().resize_(self._nbytes)
        own = self.full[self._own]
        part = self.master.part(own)
        coming = Done() if self.host is None else self.host.coming
        if self.policy.shards > 1:
            coming.wait()
            self._gathering = self.shard.start_all_gather(self.full, part)
            return
        if part.data_ptr() != own.data_ptr():
            own.copy_(part)
        self._gathering = coming

    def gather(self) -> None:
        self.start_gather(wait=True)
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self.whole = None, True

    def free(self) -> None:
        self._catch_up()
        if self.policy.free_parameters and self.whole:
            self.full.untyped_storage().resize_(0)
            self.whole = False

    def _catch_up(self) -> None:
        if self._gathering is not None:  # gathered ahead, but its module was not called
            self.gather()

    def fork(self) -> None:
        """New buffers for the parameters; what was is left to whoever holds it. The master is a shard of its own."""
        assert not self.master.in_place
        self.full = torch.empty_like(self.full)
        self.parameters = {entry.name: self._view(entry) for entry in self.unit.entries}
        self.whole = False
        self.version += 1

    def updated(self) -> None:
        """The optimizer changed the shard: what others hold of it is old."""
        self._catch_up()
        if self.host is not None:
            self.host.forget()
            self.host.rest()
        self.version += 1
        if self.master.in_place and self.policy.shards == 1:
            self.whole = True
        elif not self.policy.free_parameters:
            self.whole = False

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor:
        """The reduced shard, as it is now: ask again after every step. Zero where no gradient came."""
        if self.host is not None:
            if self.policy.paged or self.host.has_gradient:
                return self.host.gradient()
            self.host.turn.wait()
        if self._grad is not None:
            return self._grad
        fresh = self.gradients is None or self.policy.scatter_every_microbatch
        grad = self._grad_buffer()
        return grad.zero_() if fresh else grad

    def _grad_buffer(self) -> Tensor:
        if self._grad is None:
            if self.policy.scatter_every_microbatch:
                size, device = self.unit.shard_numel, self.full.device
                self._grad = torch.empty(size, dtype=self.gradient_type, device=device)
            else:
                self._grad = self._gradient_buffer()[self._own]
        return self._grad

    def _gradient_buffer(self) -> Tensor:
        if self.gradients is None:
            self.gradients = torch.empty(self.full.shape, dtype=self.gradient_type, device=self.full.device)
            self.gradients[self._trainable :].zero_()  # what is frozen, and padding: nothing else will write there
        return self.gradients

    def free_gradients(self) -> None:
        """The optimizer has used them."""
        if self.lazy:
            self.gradients = self._grad = None
            self._places.clear()

    def begin_step(self) -> None:
        if self.host is not None:
            self.host.begin_step()
        self.norms.clear()
        self._written.clear()
        self._scattered_before = False

    def begin_microbatch(self) -> None:
        self._arrived = 0

    def arrive(self, entry: Entry, gradient: Tensor) -> None:
        """Puts one parameter's gradient into its place."""
        place = self._place(entry)
        if entry.name in self._written:
            place.add_(gradient, alpha=self.scale)
        elif self.scale == 1.0:
            place.copy_(gradient)
        else:
            place.copy_(gradient).mul_(self.scale)
        self._written.add(entry.name)

    def arrive_product(self, entry: Entry, left: Tensor, right: Tensor) -> None:
        """The same for a matrix that is left x right: where types agree the product is made in its place."""
        place = self._place(entry)
        if place.dtype != left.dtype:
            self.arrive(entry, left @ right)
            return
        torch.addmm(place, left, right, beta=float(entry.name in self._written), alpha=self.scale, out=place)
        self._written.add(entry.name)

    def place_to_write(self, entries: Sequence[Entry]) -> Tensor | None:
        """Where the gradients of matrices are to be written, one below the other: they count as written.

        None where that is not all there is to do: they do not lie side by side, some gradient of theirs is there
        already, or it must be cast or multiplied.
        """
        if self.scale != 1.0 or self.gradient_type != self.full.dtype:
            return None
        if len(entries) == 1 and entries[0].name not in self._written:
            self._written.add(entries[0].name)
            return self._place(entries[0])
        start, width = self.unit.offsets[entries[0].name], entries[0].local_shape[1:]
        end = start
        for entry in entries:
            aside = self.unit.offsets[entry.name] != end or entry.local_shape[1:] != width
            if aside or entry.name in self._written:
                return None
            end += entry.local_numel
        self._written.update(entry.name for entry in entries)
        return self._gradient_buffer()[start:end].view(-1, *width)

    def gradient_of(self, entry: Entry) -> Tensor:
        """This rank's own, of a parameter, until they are reduced."""
        return self._place(entry)

    def _place(self, entry: Entry) -> Tensor:
        place = self._places.get(entry.name)
        if place is None:
            offset = self.unit.offsets[entry.name]
            place = self._gradient_buffer()[offset : offset + entry.local_numel].view(entry.local_shape)
            self._places[entry.name] = place
        return place

    def note(self) -> bool:
        """A parameter's gradients of this microbatch are all there; true when it was the last parameter."""
        self._arrived += 1
        return self.complete

    @property
    def complete(self) -> bool:
        return self._arrived == self._expected

    def start_reduce(self) -> None:
        gradients = self._gradient_buffer()
        if len(self._written) < self._expected:
            for entry in self.unit.entries:
                if entry.trainable and entry.name not in self._written:
                    self._place(entry).zero_()
        if self.on_reduce is not None:
            self.on_reduce(self)
        if self.policy.paged:
            self._start_to_host(gradients)
            return
        grad = self._grad_buffer()
        if self.policy.scatter_every_microbatch:
            self._incoming = torch.empty_like(grad) if self._scattered_before else grad
            self._scattered_before = True
            self._reducing = self.shard.start_reduce_scatter(self._incoming, gradients)
            # Gradients that arrive while these are on their way go into a buffer of their own.
            self._sending, self.gradients = gradients, None
            self._places.clear()
            self._written.clear()
        elif self.policy.shards > 1:
            self._reducing = self.shard.start_reduce_scatter(grad, gradients)
        else:
            self._reducing = self.replica.start_all_reduce(grad)

    def _start_to_host(self, gradients: Tensor) -> None:
        self._incoming = gradients[self._own]
        if self.policy.shards > 1:
            self._incoming = torch.empty_like(self._incoming)
            self._reducing = self.shard.start_reduce_scatter(self._incoming, gradients)
        self._sending, self.gradients = gradients, None
        self._places.clear()
        self._written.clear()

    def settle(self, *, last: bool) -> None:
        """Takes the scattered sum in; in the step's last microbatch the replicas' sum starts."""
        if self.policy.paged:
            self._settle_on_host()
            return
        if self.policy.shards == 1:
            return
        self._reducing.wait()
        self._reducing = Done()
        if self._incoming is not None and self._incoming is not self._grad:
            self.grad.add_(self._incoming)
        self._incoming = self._sending = None
        if last:
            self._reducing = self.replica.start_all_reduce(self.grad)

    def _settle_on_host(self) -> None:
        if self._incoming is None:
            return
        assert self.host is not None
        self._reducing.wait()
        self._reducing = Done()
        self.replica.all_reduce(self._incoming)
        self.host.add(self._incoming)
        self._incoming = self._sending = None

    def finish_reduce(self) -> None:
        self._reducing.wait()
        self._reducing = Done()
        if self.sends_early and self.host is not None and not self.host.has_gradient:
            self.norms = {part.start: norm_of(self.grad[part]) for part in self.norm_runs}
            self.host.send(self.grad)
            self.gradients = self._grad = None
            self._places.clear()

    @property
    def sends_early(self) -> bool:
        """Its gradient leaves for the host as soon as it is there."""
        return self.host is not None and self.host.early


def norm_of(values: Tensor, kind: float = 2.0) -> Tensor:
    """Short types are summed in float32 as they are read: no copy of them is made.

    A CPU adds squares up one after another, so that float32 is off by a hundredth after a hundred million: not in rows.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    if values.device.type == "cpu" and dtype == torch.float32 and kind == 2.0:
        whole = len(values) // ROW * ROW
        rows = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1, dtype=dtype)
        rest = torch.linalg.vector_norm(values[whole:], dtype=dtype)
        values = torch.cat([rows, rest[None]]).double()
    found: Tensor = torch.linalg.vector_norm(values, kind, dtype=torch.promote_types(values.dtype, torch.float32))
    return found.to(dtype)
