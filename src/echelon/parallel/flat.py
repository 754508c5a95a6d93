"""Flat units at work: parameters are views of one buffer, which is gathered, freed and reduced as a whole.

[Note: nothing is copied]

    full       [shards * S]  compute type. The modules' parameters are views of it; all-gather writes straight into it.
    master     [S]           the optimizer's shard. Where the types agree and `full` stays, it *is* a slice of `full`.
    gradients  [shards * S]  each arriving gradient is written (first) or added (later) into its place, cast on the way.
    grad       [S]           the reduced shard: a slice of `gradients`, or under zero 2 and 3 a buffer of its own.

Views of `full.data`, not of `full`, are what modules hold: `.data` has its own version counter, so refilling the
buffer does not look to autograd like a change of tensors it saved. The storage object survives being freed, so saved
weights are whole again in backward.

[Note: the order of collectives]

Units reduce in a fixed order (the reverse of forward), whatever order their gradients arrive in, so that a parameter
that some rank did not use cannot make ranks wait for different collectives. What did not arrive counts as zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.layout.placement import Entry, Piece, Placement, Unit
from echelon.parallel.axis import Axis, Done, Pending
from echelon.parallel.shard import Policy, layers


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
        self.shares_storage = compute == master and not policy.free_parameters
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
        if self.policy.scatter_every_microbatch:
            self._written.clear()

    def arrive(self, entry: Entry, gradient: Tensor) -> bool:
        """Puts one parameter's gradient into its place; true when it was the last of the unit."""
        place = self._places.get(entry.name)
        if place is None:
            offset = self.unit.offsets[entry.name]
            place = self._gradient_buffer()[offset : offset + entry.local_numel].view(entry.local_shape)
            self._places[entry.name] = place
        if entry.name in self._written:
            place.add_(gradient, alpha=self.scale)
        elif self.scale == 1.0:
            place.copy_(gradient)
        else:
            place.copy_(gradient).mul_(self.scale)
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
        self._incoming = None
        if self.policy.scatter_every_microbatch:
            self.gradients = None
            self._places.clear()
        if last:
            self._reducing = self.replica.start_all_reduce(self.grad)

    def finish_reduce(self) -> None:
        self._reducing.wait()
        self._reducing = Done()


class Flat:
    """All units of a model, driven by hooks on its modules and parameters."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        policy: Policy,
        shard: Axis,
        replica: Axis,
        *,
        device: torch.device,
        compute: torch.dtype,
        master: torch.dtype,
    ):
        self.model, self.placement, self.policy = model, placement, policy
        self.units = [
            FlatUnit(unit, policy, shard, replica, device=device, compute=compute, master=master)
            for unit in placement.units
        ]
        self._last = True
        self._waiting: deque[FlatUnit] = deque()
        self._launched: list[FlatUnit] = []
        self._put_parameters()
        if policy.shards > 1 or not self.units[0].shares_storage:
            self._hook_model()
            for unit in self.units:
                if not unit.unit.kept:
                    self._hook_layer(unit)

    def _put_parameters(self) -> None:
        modules = dict(self.model.named_modules())
        for unit in self.units:
            for entry in unit.unit.entries:
                parameter = unit.parameters[entry.name]
                for name in entry.names:
                    home, _, attribute = name.rpartition(".")
                    modules[home].register_parameter(attribute, parameter)
                if entry.trainable:
                    parameter.register_post_accumulate_grad_hook(self._on_gradient(unit, entry))

    def fill(self, values: Callable[[Piece], Tensor]) -> None:
        """Sets every shard from a function that gives a piece's values."""
        with torch.no_grad():
            for unit in self.units:
                for entry in unit.unit.entries:
                    piece = self.placement.piece(unit.unit, entry)
                    if piece.start < piece.stop:
                        self.view(unit.master, piece).copy_(values(piece))
                unit.updated()

    @staticmethod
    def view(shard: Tensor, piece: Piece) -> Tensor:
        """A piece's elements in a unit's shard (of values, gradients, or optimizer states)."""
        return shard[piece.shard_offset : piece.shard_offset + piece.stop - piece.start]

    def pieces(self) -> Iterator[tuple[FlatUnit, Piece]]:
        for unit in self.units:
            for entry in unit.unit.entries:
                yield unit, self.placement.piece(unit.unit, entry)

    # -- one microbatch -----------------------------------------------------------------------------------------------

    def begin(self, *, first: bool, last: bool) -> None:
        """Before a microbatch's forward. `first` and `last` are of the step."""
        self._last = last
        self._waiting = deque(reversed(self.units)) if last or self.policy.scatter_every_microbatch else deque()
        self._launched = []
        for unit in self.units:
            if first:
                unit.begin_step()
            unit.begin_microbatch()

    def end(self) -> None:
        """After a microbatch's backward: what has not been reduced is, and everything under way is waited for."""
        self._launch(everything=True)
        for unit in self._launched[-1:] if self.policy.settle_early else self._launched:
            unit.settle(last=self._last)
        for unit in self._launched if self._last else ():
            unit.finish_reduce()
        self._launched = []
        for unit in self.units:
            unit.free()

    def updated(self) -> None:
        for unit in self.units:
            unit.updated()

    @contextmanager
    def outside_gathered(self) -> Iterator[None]:
        """All but the layers whole, for calls of the model's methods other than its forward, which no hook sees."""
        inside = layers(self.model)
        for unit in self.units:
            if unit.unit.kept or unit.unit.name not in inside:
                unit.gather()
        yield
        for unit in self.units:
            unit.free()

    def _gather_kept(self) -> None:
        # What stays whole is gathered at the model's start, in one order everywhere, so that ranks may call different
        # modules. Layers that are freed after use may not differ: their gathers come in the order of calls.
        early = [unit for unit in self.units if unit.unit.kept or not self.policy.free_parameters]
        for unit in early:
            unit.start_gather()
        for unit in early:
            if unit.unit.kept:
                unit.gather()

    def _launch(self, *, everything: bool) -> None:
        while self._waiting and (everything or self._waiting[0].complete):
            unit = self._waiting.popleft()
            unit.start_reduce()
            if self._launched and self.policy.settle_early:
                self._launched[-1].settle(last=self._last)  # one behind: its transfer had a unit's compute to hide in
            self._launched.append(unit)

    def _on_gradient(self, unit: FlatUnit, entry: Entry) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            if unit.arrive(entry, gradient):
                if unit.all_trainable:  # otherwise backward may still have to pass through what is frozen
                    unit.free()
                self._launch(everything=False)

        return hook

    # -- hooks on modules ---------------------------------------------------------------------------------------------

    def _hook_model(self) -> None:
        def before_forward(_module: nn.Module, _args: Any) -> None:
            self._gather_kept()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            if not any(tensor.requires_grad for tensor in tensors_in(output)):  # evaluation: no backward will free it
                for unit in self.units:
                    unit.free()

        self.model.register_forward_pre_hook(before_forward)
        self.model.register_forward_hook(after_forward)

    def _hook_layer(self, unit: FlatUnit) -> None:
        freed = [other for other in self.units if not other.unit.kept]
        index, module = freed.index(unit), self.model.get_submodule(unit.unit.name)
        prefetch = self.policy.prefetch if self.policy.free_parameters else 0
        ahead = freed[index + 1 : index + 1 + prefetch]
        behind = freed[max(index - prefetch, 0) : index][::-1]
        is_last = index == len(freed) - 1

        def gather_with(others: list[FlatUnit]) -> None:
            unit.gather()
            for other in others:
                other.start_gather()

        def before_forward(_module: nn.Module, _args: Any) -> None:
            gather_with(ahead)

        def before_backward(_gradient: Tensor) -> None:
            gather_with([other for other in behind if not other.complete])

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not outputs and torch.is_grad_enabled():
                return  # backward may pass through something that we cannot see into: kept until the end
            if not outputs or (self.policy.reshard_after_forward and not is_last):
                unit.free()
            for tensor in outputs if self.policy.free_parameters else ():
                tensor.register_hook(before_backward)

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)


@contextmanager
def explained(policy: Policy) -> Iterator[None]:
    """Says what it means when a parameter is read that is not there."""
    try:
        yield
    except RuntimeError as error:
        if not policy.free_parameters or "storage of size 0" not in str(error):
            raise
        raise ValueError(
            "a layer's parameters were used outside its own forward, where zero=3 has freed them; "
            "set shard.units to patterns of the modules that are called, or use zero=2"
        ) from error


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
