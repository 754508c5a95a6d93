"""The update on the host, beside the device's work (ZeRO-Offload), and both updates as one.

[Note: a step's update]

    device   ... last backward | norm | forward 0 | forward 1 | forward 2 | ...
    host                              | update 0 | update 1 | update 2 | ...        a worker's thread (memory/offload/host_worker.py)
    down                       | gradient 0 | 1 | 2 | ...
    up                                          | values 0 | 1 | 2 | ...

`step` only hands the work over: nobody waits for the device. The worker reads the norm's factor when the device has it,
then takes units in the order in which the next forward needs them. While one is updated the next one's gradient comes
down and the last one's values go up. A unit's forward waits for that unit alone (parallel/dp/offloaded_param_group.py).

Gradients that lie on the device in the masters' type are multiplied by the factor there, on their way down. Shorter
ones are made longer on the host first: what divides by a loss scale and a number of targets may be zero in their type.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.memory.offload.disk_store import DiskError, Store
from echelon.memory.offload.host_transfer import Moving, Room
from echelon.memory.offload.host_worker import NOTHING, Turn
from echelon.optim.optimizer_protocol import Update
from echelon.optim.optimizer_state import Kept
from echelon.parallel.dp.offloaded_param_group import HostUnit
from echelon.parallel.dp.param_group import FlatUnit

ONE = torch.ones((), dtype=torch.float64)
YES = torch.ones((), dtype=torch.bool)


@dataclass
class _Due:
    """One unit's part in a step."""

    unit: HostUnit
    update: Update
    gradient: Tensor | None
    """on the device; none where it has come already"""
    factor: Tensor | None
    """what a gradient on the device is multiplied by on its way; none where the host multiplies it"""
    turn: Turn
    room: Room | None = None
    coming: Moving | None = None
    read: Turn = NOTHING
    written: Turn = NOTHING


class OnHost:
    """The updates of units whose states live on the host, each by itself."""

    def __init__(
        self, units: Sequence[FlatUnit], make: Callable[[HostUnit], Update], state_bytes: Callable[[HostUnit], int]
    ):
        """`state_bytes` is what the rule keeps of a unit."""
        # What is whole from the start of the model is needed first, then the layers in the order of forward.
        self._units = sorted(units, key=lambda unit: not unit.unit.kept)
        self._hosts = [unit.host for unit in self._units if unit.host is not None]
        self._updates: list[Update] = []
        for host in self._hosts:
            host.hold()  # its parts are looked at, not their values
            self._updates.append(make(host))
            host.let_go()
            host.states = partial(_by_element, weakref.ref(self._updates[-1]))  # or they would hold each other
        _reserve(self._hosts, state_bytes)

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        due = []
        for unit, update in zip(self._units, self._updates, strict=True):
            host = unit.host
            assert host is not None
            host.job.wait()
            gradient = None if host.own is not None else unit.grad
            # Made here: what the worker would give the device comes after what this thread gives it.
            factor = scale.to(host.arrives_in) if host.arrives_in == host.tensor.dtype else None
            due.append(_Due(host, update, gradient, factor, Turn(f"the update of {host.name}")))
        shared = due[0].unit.host
        told, mark = shared.link.ask(torch.stack([scale, live.to(scale.dtype)])), shared.link.mark()
        for one in due:
            one.unit.turn = one.turn
        job = shared.worker.give("the update", lambda: _run(due, lr, told, mark))
        for one in due:
            one.unit.job = job

    def states(self) -> list[Tensor]:
        """On the host."""
        found: list[Tensor] = []
        for host, update in zip(self._hosts, self._updates, strict=True):
            host.wait()
            states = update.states()
            if host.store is not None:
                copies = iter(host.loaded()[1:])
                states = [state if state.dim() == 0 else next(copies) for state in states]
            found += states
        return found

    def kept(self) -> Iterator[Kept]:
        """On the host; those of a unit on disk are in memory until the next unit's are asked for."""
        for host, update in zip(self._hosts, self._updates, strict=True):
            with host.opened():
                yield from update.kept()

    def collectives(self) -> list[Collective]:
        """Rules that would send something are refused (hosted.py)."""
        return []


def _by_element(update: weakref.ref[Update]) -> list[Tensor]:
    """What it keeps, without counts."""
    found = update()
    return [] if found is None else [state for state in found.states() if state.dim() > 0]


def _reserve(hosts: Sequence[HostUnit], state_bytes: Callable[[HostUnit], int]) -> None:
    """Room on disk for everything that will be there: a disk that is too small is found now."""
    disk = hosts[0].host.disk if hosts else None
    if disk is None:
        return
    needed = {host: host.unit.shard_numel * host.tensor.itemsize + state_bytes(host) for host in hosts}
    try:
        disk.check(2 * sum(needed.values()) - 2 * sum(host.store.reserved for host in hosts if host.store is not None))
        for host, nbytes in needed.items():
            assert host.store is not None
            host.store.reserve(nbytes)
    except DiskError:
        disk.close()  # what was reserved is free for somebody else
        raise


def _run(due: list[_Due], lr: float, told: Callable[[], list[float]], mark: Moving) -> None:
    """The worker's part."""
    try:
        factor, live = told()
        if live:
            _fetch(due[0], mark)
            for place, one in enumerate(due):
                if place >= 2:
                    due[place - 2].written.wait()  # memory for three units: one comes, one is here, one goes
                if place + 1 < len(due):
                    _fetch(due[place + 1], mark)
                _update(one, lr, torch.tensor(factor, dtype=torch.float64), mark)
                one.turn.end()
        _commit(due)
        for one in due:
            one.turn.end()
    except BaseException as error:
        _take_back(due, error)
        for one in due:
            if not one.turn.is_over:
                one.turn.end(error)
        raise


def _fetch(one: _Due, mark: Moving) -> None:
    """The gradient comes down, and from disk what is updated."""
    if (disk := one.unit.host.disk) is not None:
        one.read = disk.reader.give(f"reading {one.unit.name}", one.unit.bring)
    if one.gradient is not None:
        rooms, gradient = one.unit.host.rooms, one.gradient
        one.room = rooms.take()
        there = one.room.of(gradient.numel(), gradient.dtype)
        one.coming = one.unit.host.link.down(gradient, there, "gradients", after=mark, factor=one.factor)


def _update(one: _Due, lr: float, factor: Tensor, mark: Moving) -> None:
    unit = one.unit
    if one.gradient is not None:
        assert one.room is not None
        assert one.coming is not None
        one.coming.done()
        found = one.room.of(one.gradient.numel(), one.gradient.dtype)
        one.gradient, factor = None, factor if one.factor is None else ONE
    else:
        assert unit.own is not None
        found = unit.own
    if found.dtype != unit.tensor.dtype:  # it came no longer than it was
        short, one.room = one.room, unit.host.rooms.take()
        found = one.room.of(found.numel(), unit.tensor.dtype).copy_(found)
        if short is not None:
            unit.host.rooms.give_back(short)
    unit.grad = found
    one.read.wait()
    one.update.step(lr, factor, YES)
    unit.followed()
    del unit.grad
    if one.room is not None:
        unit.host.rooms.give_back(one.room)
    unit.publish(mark)
    if unit.host.disk is not None:
        one.written = unit.host.disk.writer.give(f"writing {unit.name}", unit.put_away)


def _commit(due: list[_Due]) -> None:
    """When all is written, all of it counts."""
    for one in due:
        one.written.wait()
    for store in _stores(due):
        store.commit()


def _take_back(due: list[_Due], error: BaseException) -> None:
    """On disk, the step before is what there is."""
    if (disk := due[0].unit.host.disk) is None:
        return
    disk.failed.append(error)
    for one in due:
        with suppress(Exception):
            one.written.wait()
    for store in _stores(due):
        store.take_back()


def _stores(due: list[_Due]) -> list[Store]:
    return [store for one in due for store in (one.unit.store, one.unit.parts) if store is not None]


class Together:
    """The device's units, and the host's beside them."""

    def __init__(self, here: Update, there: OnHost):
        self._here, self._there = here, there

    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._there.step(lr, scale, live)
        self._here.step(lr, scale, live)

    def states(self) -> list[Tensor]:
        return [*self._here.states(), *self._there.states()]

    def kept(self) -> Iterator[Kept]:
        yield from self._here.kept()
        yield from self._there.kept()

    def collectives(self) -> list[Collective]:
        return [*self._here.collectives(), *self._there.collectives()]
