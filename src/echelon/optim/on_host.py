"""The update on the host, beside the device's work (ZeRO-Offload), and both updates as one.

[Note: a step's update]

    device   ... last backward | norm | forward 0 | forward 1 | forward 2 | ...
    host                              | update 0 | update 1 | update 2 | ...        a worker's thread (memory/worker.py)
    down                       | gradient 0 | 1 | 2 | ...
    up                                          | values 0 | 1 | 2 | ...

`step` only hands the work over: nobody waits for the device. The worker reads the norm's factor when the device has it,
then takes units in the order in which the next forward needs them. While one is updated the next one's gradient comes
down and the last one's values go up. A unit's forward waits for that unit alone (parallel/host_unit.py).

Gradients that lie on the device are multiplied by the factor there, on their way down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.memory.link import Moving, Room
from echelon.memory.worker import Turn
from echelon.optim.rule import Update
from echelon.parallel.flat_unit import FlatUnit
from echelon.parallel.host_unit import HostUnit

ONE = torch.ones((), dtype=torch.float64)
YES = torch.ones((), dtype=torch.bool)


@dataclass
class _Due:
    """One unit's part in a step."""

    unit: HostUnit
    update: Update
    gradient: Tensor | None
    """on the device; none where it has come already"""
    turn: Turn
    room: Room | None = None
    coming: Moving | None = None


class OnHost:
    """The updates of units whose states live on the host, each by itself."""

    def __init__(self, units: Sequence[FlatUnit], make: Callable[[HostUnit], Update]):
        # What is whole from the start of the model is needed first, then the layers in the order of forward.
        self._units = sorted(units, key=lambda unit: not unit.unit.kept)
        self._updates = [make(unit.host) for unit in self._units if unit.host is not None]

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        due = []
        for unit, update in zip(self._units, self._updates, strict=True):
            host = unit.host
            assert host is not None
            host.turn.wait()
            gradient = None if host.own is not None else unit.grad
            due.append(_Due(host, update, gradient, Turn(f"the update of {host.name}")))
        shared = due[0].unit.host
        told, mark = shared.link.ask(torch.stack([scale, live.to(scale.dtype)])), shared.link.mark()
        for one in due:
            one.unit.turn = one.turn
        shared.worker.give("the update", lambda: _run(due, lr, scale, told, mark))

    def states(self) -> list[Tensor]:
        """On the host."""
        for unit in self._units:
            assert unit.host is not None
            unit.host.wait()
        return [state for update in self._updates for state in update.states()]


def _run(due: list[_Due], lr: float, scale: Tensor, told: Callable[[], list[float]], mark: Moving) -> None:
    """The worker's part."""
    try:
        factor, live = told()
        if live:
            _fetch(due[0], scale, mark)
            for one, after in zip(due, [*due[1:], None], strict=True):
                if after is not None:
                    _fetch(after, scale, mark)
                _update(one, lr, torch.tensor(factor, dtype=torch.float64), mark)
                one.turn.end()
        for one in due:
            one.turn.end()
    except BaseException as error:
        for one in due:
            if not one.turn.is_over:
                one.turn.end(error)
        raise


def _fetch(one: _Due, scale: Tensor, mark: Moving) -> None:
    """The gradient comes down."""
    if one.gradient is not None:
        rooms, gradient = one.unit.host.rooms, one.gradient
        one.room = rooms.take()
        there = one.room.of(gradient.numel(), gradient.dtype)
        factor = scale.to(gradient.dtype)
        one.coming = one.unit.host.link.down(gradient, there, "gradients", after=mark, factor=factor)


def _update(one: _Due, lr: float, factor: Tensor, mark: Moving) -> None:
    unit = one.unit
    if one.gradient is not None:
        assert one.room is not None
        assert one.coming is not None
        one.coming.done()
        found = one.room.of(one.gradient.numel(), one.gradient.dtype)
        one.gradient, factor = None, ONE
    else:
        assert unit.own is not None
        found = unit.own
    if found.dtype != unit.tensor.dtype:  # it came early, and no longer than it was
        one.room = unit.host.rooms.take()
        found = one.room.of(found.numel(), unit.tensor.dtype).copy_(found)
    unit.grad = found
    one.update.step(lr, factor, YES)
    del unit.grad
    if one.room is not None:
        unit.host.rooms.give_back(one.room)
    unit.publish(mark)


class Together:
    """The device's units, and the host's beside them."""

    def __init__(self, here: Update, there: OnHost):
        self._here, self._there = here, there

    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._there.step(lr, scale, live)
        self._here.step(lr, scale, live)

    def states(self) -> list[Tensor]:
        return [*self._here.states(), *self._there.states()]
