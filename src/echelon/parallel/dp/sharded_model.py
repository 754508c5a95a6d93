"""Flat units at work: a model whose parameters are gathered, freed and reduced unit by unit (flat_unit.py).

[Note: the order of collectives]

Units reduce in a fixed order (the reverse of forward), whatever order their gradients arrive in, so that a parameter
that some rank did not use cannot make ranks wait for different collectives. What did not arrive counts as zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.layout.placement import Piece, Placement, Unit
from echelon.parallel.comm.mesh_axis import Axis
from echelon.parallel.dp.grad_buffer import Home, home_of
from echelon.parallel.dp.offloaded_param_group import Host
from echelon.parallel.dp.param_group import FlatUnit
from echelon.parallel.dp.zero import Policy, layers

Moved = tuple[Policy, Axis, Axis]
"""how a unit is moved: when, over which ranks it is divided, and on which it is copied"""


class Flat:
    """All units of a model, driven by hooks on its modules and parameters.

    `parts` names the modules of each stage where a pipeline runs several microbatches at a time and reduces by itself
    (pipeline/execution/fsdp_hooks.py). What is kept then stays whole for the step, and gathering ahead stays inside a stage.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        policy: Policy,
        moved: Callable[[Unit], Moved],
        *,
        device: torch.device,
        compute: torch.dtype,
        master: torch.dtype,
        reduce: torch.dtype,
        parts: Sequence[Sequence[str]] = (),
        host: Callable[[Unit], Host | None] = lambda _: None,
    ):
        self.model, self.placement, self.policy = model, placement, policy
        self.units = [
            FlatUnit(unit, *moved(unit), device=device, compute=compute, master=master, reduce=reduce, host=host(unit))
            for unit in placement.units
        ]
        self.pipelined = bool(parts)
        self.parts = [[unit for unit in self.units if _used(unit, names)] for names in parts] or [self.units]
        self._last = True
        self._waiting: deque[FlatUnit] = deque()
        self._launched: list[FlatUnit] = []
        self._unsettled: list[FlatUnit] = []
        self.on_gradient: Callable[[], None] = _nothing
        """called whenever a gradient has arrived"""
        self.on_reduced: Callable[[FlatUnit], None] | None = None
        """called with each unit whose gradients of a step are reduced, while backward goes on (training/optimizer_in_backward.py)"""
        self._modules = dict(model.named_modules())
        for unit in self.units:
            self.put(unit)
        # Where ranks gather together what the host updates, each layer is gathered when it is called: `_gather_host`.
        self._by_turns = [unit for unit in self.units if _comes_late(unit)]
        if any(unit.policy.shards > 1 for unit in self.units) or not all(unit.master.in_place for unit in self.units):
            self._hook_model()
            for unit in self.units:
                if not unit.unit.kept:
                    self._hook_layer(unit)

    def put(self, unit: FlatUnit) -> None:
        """Makes a unit's parameters those of the modules."""
        self._put(unit, unit.parameters)
        for entry in unit.unit.entries:
            if entry.trainable:
                Home(self, unit, entry).of(unit.parameters[entry.name])

    def put_parameters(self, parameters: Sequence[Mapping[str, nn.Parameter]]) -> None:
        """The same with other parameters that units had before, which bring their hooks."""
        for unit, found in zip(self.units, parameters, strict=True):
            self._put(unit, found)

    def _put(self, unit: FlatUnit, parameters: Mapping[str, nn.Parameter]) -> None:
        for entry in unit.unit.entries:
            for name in entry.names:
                module, _, attribute = name.rpartition(".")
                self._modules[module].register_parameter(attribute, parameters[entry.name])

    def fill(self, values: Callable[[Piece], Tensor]) -> None:
        """Sets every shard from a function that gives a piece's values."""
        with torch.no_grad():
            for unit in self.units:
                for entry in unit.unit.entries:
                    piece = self.placement.piece(unit.unit, entry)
                    if piece.start < piece.stop:
                        unit.master.set(piece.shard_offset, values(piece))
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
        self._waiting = deque(unit for unit in reversed(self.units) if last or unit.policy.scatter_every_microbatch)
        self._launched, self._unsettled = [], []
        for unit in self.units:
            if first:
                unit.begin_step()
            unit.begin_microbatch()

    def end(self) -> None:
        """After a microbatch's backward: what has not been reduced is, and everything under way is waited for."""
        self._launch(everything=True)
        for unit in self._unsettled:
            unit.settle(last=self._last)
        self._unsettled = []
        for unit in self._launched[:] if self._last else ():
            self._finish(unit)
        self._launched = []
        for unit in self.units:
            unit.free()

    def updated(self) -> None:
        for unit in self.units:
            unit.updated()

    def free_gradients(self) -> None:
        for unit in self.units:
            unit.free_gradients()

    def make_whole(self, module: nn.Module) -> None:
        """Before a layer is repeated in backward, whose hooks then do not run. Backward through it frees it."""
        for unit in self.units:
            if unit.policy.free_parameters and self._modules.get(unit.unit.name) is module:
                unit.gather()

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
        early = [unit for unit in self.units if unit.unit.kept or not unit.policy.free_parameters]
        early = [unit for unit in early if unit not in self._by_turns]
        for unit in early:
            unit.start_gather()
        for unit in early:
            if unit.unit.kept:
                unit.gather()

    def _gather_host(self, until: FlatUnit | None = None) -> None:
        """What the host has updated, up to a unit: in one order on all ranks, whichever modules they call."""
        for unit in self._by_turns:
            unit.gather()
            if unit is until:
                return

    def _launch(self, *, everything: bool) -> None:
        while self._waiting and (everything or self._waiting[0].complete):
            unit = self._waiting.popleft()
            unit.start_reduce()
            if unit.sends_early:
                unit.finish_reduce()
            for other in [other for other in self._unsettled if other.policy.settle_early]:
                other.settle(last=self._last)  # one behind: its transfer had a unit's compute to hide in
                self._unsettled.remove(other)
            self._launched.append(unit)
            self._unsettled.append(unit)
            if self.on_reduced is not None and self._last:
                for other in self._launched[:-1]:  # one behind, too
                    self._finish(other)

    def _finish(self, unit: FlatUnit) -> None:
        if unit in self._unsettled:
            unit.settle(last=True)
            self._unsettled.remove(unit)
        unit.finish_reduce()
        self._launched.remove(unit)
        if self.on_reduced is not None:
            self.on_reduced(unit)

    @torch.no_grad()
    def deliver(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """A parameter's gradient, left x right, that was put off: into its place without a backward pass."""
        home_of(parameter).deliver(left, right)

    def complete(self, unit: FlatUnit) -> None:
        """All gradients of a unit are there."""
        # Where something is frozen, backward may still have to pass through it.
        if unit.all_trainable and not (self.pipelined and unit.unit.kept):
            unit.free()
        self._launch(everything=False)

    # -- hooks on modules ---------------------------------------------------------------------------------------------

    def _hook_model(self) -> None:
        def before_forward(_module: nn.Module, _args: Any) -> None:
            self._gather_kept()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            self._gather_host()
            if not any(tensor.requires_grad for tensor in tensors_in(output)):  # evaluation: no backward will free it
                for unit in self.units:
                    unit.free()

        self.model.register_forward_pre_hook(before_forward)
        self.model.register_forward_hook(after_forward)

    def _hook_layer(self, unit: FlatUnit) -> None:
        part = next(part for part in self.parts if unit in part)
        freed = [other for other in part if not other.unit.kept]
        index, module = freed.index(unit), self.model.get_submodule(unit.unit.name)
        prefetch = unit.policy.prefetch if unit.policy.free_parameters else 0
        ahead = freed[index + 1 : index + 1 + prefetch]
        behind = freed[max(index - prefetch, 0) : index][::-1]
        is_last = index == len(freed) - 1 and not self.pipelined  # other microbatches come before its backward

        def gather_with(others: list[FlatUnit]) -> None:
            unit.gather()
            for other in others:
                other.start_gather()

        def before_forward(_module: nn.Module, _args: Any) -> None:
            if unit in self._by_turns:
                self._gather_host(until=unit)
            # In a repetition, what comes after this module may have gone backward already.
            gather_with([other for other in ahead if self.pipelined or not _is_through(other)])

        def before_backward(_gradient: Tensor) -> None:
            if _is_through(unit):
                return  # another output of the module asked before, and its gradients are all there
            gather_with([other for other in behind if not other.complete])

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not outputs and torch.is_grad_enabled():
                return  # backward may pass through something that we cannot see into: kept until the end
            if not outputs or ((self.policy.reshard_after_forward or self.pipelined) and not is_last):
                unit.free()
            for tensor in outputs if unit.policy.free_parameters else ():
                tensor.register_hook(before_backward)

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)


def _is_through(unit: FlatUnit) -> bool:
    """All gradients of the microbatch at hand are there."""
    return unit.all_trainable and unit.complete


def _nothing() -> None:
    """Nobody asked to be told."""


def _comes_late(unit: FlatUnit) -> bool:
    """A layer that stays whole, that ranks gather together, and whose values the host is still at work on."""
    return unit.host is not None and unit.policy.shards > 1 and not unit.policy.free_parameters and not unit.unit.kept


def _used(unit: FlatUnit, names: Sequence[str]) -> bool:
    mine = [name for entry in unit.unit.entries for name in entry.names]
    return any(name == other or name.startswith(other + ".") for name in mine for other in names)


@contextmanager
def explained() -> Iterator[None]:
    """Says what it means when a parameter is read that is not there."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise ValueError(
            "a layer's parameters were used outside its own forward, where zero=3 or offload=params has freed them; "
            "set shard.units to patterns of the modules that are called, or use zero=2 and no offload=params"
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
