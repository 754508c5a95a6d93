"""One flat unit on one rank: its buffers, and the moves between them.

[Note: nothing is copied]

    full       [shards * S]  compute type. The modules' parameters are views of it; all-gather writes straight into it.
    master     [S]           the optimizer's shard. Where the types agree and `full` stays, it *is* a slice of `full`.
    gradients  [shards * S]  each arriving gradient is written (first) or added (later) into its place, cast on the way.
    grad       [S]           the reduced shard: a slice of `gradients`, or under zero 2 and 3 a buffer of its own.

Views of `full.data`, not of `full`, are what modules hold: `.data` has its own version counter, so refilling the
buffer does not look to autograd like a change of tensors it saved. The storage object survives being freed, so saved
weights are whole again in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.layout.placement import Entry, Unit
from echelon.parallel.axis import Axis, Done, Pending
from echelon.parallel.shard import Policy


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
    ):
        self.unit, self.policy, self.shard, self.replica = unit, policy, shard, replica
        size = unit.shard_numel
        self._own = slice(shard.index * size, (shard.index + 1) * size) if policy.shards > 1 else slice(0, size)
        self.full = torch.zeros(unit.shards * size, dtype=compute, device=device)
        self.shares_storage = policy.shares_storage(same_type=compute == master)
        self.master = self.full[self._own] if self.shares_storage else torch.zeros(size, dtype=master, device=device)
        self.parameters = {entry.name: self._view(entry) for entry in unit.entries}
        self._nbytes = self.full.untyped_storage().nbytes()
        self.whole = False
        self._gathering: Pending | None = None
        if policy.free_parameters:
            self.full.untyped_storage().resize_(0)

        self.gradients: Tensor | None = None
        self.grad = torch.zeros(size if policy.scatter_every_microbatch else 0, dtype=master, device=device)
        if not policy.scatter_every_microbatch:
            self.gradients = torch.zeros(self.full.shape, dtype=master, device=device)
            self.grad = self.gradients[self._own]
        self.scale = 1.0
        """what arriving gradients are multiplied by"""
        self._written: set[str] = set()
        self._places: dict[str, Tensor] = {}
        self._arrived = 0
        self._expected = sum(entry.trainable for entry in unit.entries)
        self.all_trainable = self._expected == len(unit.entries)
        self._scattered_before = False
        self._incoming: Tensor | None = None
        self._sending: Tensor | None = None
        self._reducing: Pending = Done()

    def _view(self, entry: Entry) -> nn.Parameter:
        offset = self.unit.offsets[entry.name]
        data = self.full.data[offset : offset + entry.local_numel].view(entry.local_shape)
        return nn.Parameter(data, requires_grad=entry.trainable)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        if self.whole or self._gathering is not None:
            return
        if self.policy.free_parameters:
            self.full.untyped_storage().resize_(self._nbytes)
        own = self.full[self._own]
        if not self.shares_storage:
            own.copy_(self.master)
        self._gathering = self.shard.start_all_gather(self.full, own) if self.policy.shards > 1 else Done()

    def gather(self) -> None:
        self.start_gather()
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
        """New buffers for the parameters; what was is left to whoever holds it. The master is a copy of its own."""
        assert not self.shares_storage
        self.full = torch.empty_like(self.full)
        self.parameters = {entry.name: self._view(entry) for entry in self.unit.entries}
        self.whole = False

    def updated(self) -> None:
        """The optimizer changed the shard: what others hold of it is old."""
        self._catch_up()
        if self.shares_storage and self.policy.shards == 1:
            self.whole = True
        elif not self.policy.free_parameters:
            self.whole = False

    # -- gradients ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._written.clear()
        self._scattered_before = False

    def begin_microbatch(self) -> None:
        self._arrived = 0

    def arrive(self, entry: Entry, gradient: Tensor) -> bool:
        """Puts one parameter's gradient into its place; true when it was the last of the unit."""
        place = self._place(entry)
        if entry.name in self._written:
            place.add_(gradient, alpha=self.scale)
        elif self.scale == 1.0:
            place.copy_(gradient)
        else:
            place.copy_(gradient).mul_(self.scale)
        return self._note(entry)

    def arrive_product(self, entry: Entry, left: Tensor, right: Tensor) -> bool:
        """The same for a matrix that is left x right: where types agree the product is made in its place."""
        place = self._place(entry)
        if place.dtype != left.dtype:
            return self.arrive(entry, left @ right)
        torch.addmm(place, left, right, beta=float(entry.name in self._written), alpha=self.scale, out=place)
        return self._note(entry)

    def _place(self, entry: Entry) -> Tensor:
        place = self._places.get(entry.name)
        if place is None:
            offset = self.unit.offsets[entry.name]
            place = self._gradient_buffer()[offset : offset + entry.local_numel].view(entry.local_shape)
            self._places[entry.name] = place
        return place

    def _note(self, entry: Entry) -> bool:
        self._written.add(entry.name)
        self._arrived += 1
        return self.complete

    @property
    def complete(self) -> bool:
        return self._arrived == self._expected

    def _gradient_buffer(self) -> Tensor:
        if self.gradients is None:
            self.gradients = torch.empty(
                self.unit.shards * self.unit.shard_numel, dtype=self.grad.dtype, device=self.full.device
            )
            self.gradients[self.unit.numel :].zero_()
        return self.gradients

    def start_reduce(self) -> None:
        gradients = self._gradient_buffer()
        for entry in self.unit.entries:
            if entry.name not in self._written:
                offset = self.unit.offsets[entry.name]
                gradients[offset : offset + entry.local_numel].zero_()
        if self.policy.scatter_every_microbatch:
            self._incoming = torch.empty_like(self.grad) if self._scattered_before else self.grad
            self._scattered_before = True
            self._reducing = self.shard.start_reduce_scatter(self._incoming, gradients)
            # Gradients that arrive while these are on their way go into a buffer of their own.
            self._sending, self.gradients = gradients, None
            self._places.clear()
            self._written.clear()
        elif self.policy.shards > 1:
            self._reducing = self.shard.start_reduce_scatter(self.grad, gradients)
        else:
            self._reducing = self.replica.start_all_reduce(self.grad)

    def settle(self, *, last: bool) -> None:
        """Takes the scattered sum in; in the step's last microbatch the replicas' sum starts."""
        if self.policy.shards == 1:
            return
        self._reducing.wait()
        self._reducing = Done()
        if self._incoming is not None and self._incoming is not self.grad:
            self.grad.add_(self._incoming)
        self._incoming = self._sending = None
        if last:
            self._reducing = self.replica.start_all_reduce(self.grad)

    def finish_reduce(self) -> None:
        self._reducing.wait()
        self._reducing = Done()
