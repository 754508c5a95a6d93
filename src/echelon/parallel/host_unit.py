"""A unit whose states live on the host: master values, moments, and where it is asked for parameters and gradients too.

[Note: two sides of a unit]

    on the device (FlatUnit)                          on the host (HostUnit)
    gradients, added up over microbatches ── down ──> the gradient, in a room that units share    (`optimizer`)
    a gradient that comes once a step     ── down ──> a room of its own, as soon as it is there   (`optimizer`)
    a gradient of every microbatch        ── down ──> added to the sum, by the worker             (`params`)
                                                      update of master values and moments, by the worker
    this rank's part of the parameters   <─── up ──── a cast of the master values

To an update (optim/) the host's side looks like a unit whose device is the host. Only the worker touches it while a
step's update is under way: everybody else calls `wait` first, and every way in here does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.layout.placement import Unit
from echelon.memory.link import THROUGH, Link, Moving, Rooms
from echelon.memory.worker import NOTHING, Turn, Worker
from echelon.parallel.master import EVERYTHING, WholeMaster

ROOMS = 3
"""buffers for gradients: one is read by the update, one comes, one is free to be asked for"""
STAGES = 2
"""buffers for parameters on their way up"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What all units of a rank share on the host."""

    link: Link
    worker: Worker
    rooms: Rooms
    """for gradients on their way down"""
    stages: Rooms
    """for parameters on their way up"""
    paged: bool
    """parameters and gradients live here too"""
    folder: str = ""
    """where files are made for what would be here; empty keeps it here"""

    @classmethod
    def of(cls, link: Link, *, largest: int, paged: bool, folder: str = "") -> Host:
        """`largest` are the bytes of the largest shard, in its longest type."""
        return cls(
            link=link,
            worker=Worker("echelon-host"),
            rooms=Rooms(link, ROOMS, largest),
            stages=Rooms(link, STAGES, largest),
            paged=paged,
            folder=folder,
        )


class HostUnit:
    """The host's side of one unit."""

    def __init__(
        self,
        unit: Unit,
        host: Host,
        *,
        here: Tensor | None,
        compute: torch.dtype,
        master: torch.dtype,
        gradient_type: torch.dtype,
        early: bool,
    ):
        self.unit, self.host = unit, host
        self.compute, self.gradient_type = compute, gradient_type
        self.tensor = torch.zeros(unit.shard_numel, dtype=master)
        """master values"""
        self.here = here
        """on the device, this rank's part of the parameters; none where they are paged"""
        self.there = host.link.room(unit.shard_numel, compute) if here is None else None
        """that part on the host, where it is not on the device"""
        self.early = early
        """its gradient comes once a step, as it is used: it leaves the device as soon as it is there"""
        self.own: Tensor | None = None
        """a gradient of its own: the one that came early, or the sum over microbatches"""
        if early:
            self.own = host.link.room(unit.shard_numel, gradient_type)
        elif host.paged:
            self.own = torch.zeros(unit.shard_numel, dtype=master)
        self.turn: Turn = NOTHING
        """the update that is under way"""
        self.coming: Moving = THROUGH
        """the part of the parameters on its way up"""
        self._stale = True
        self._fresh = True
        self._sums: Turn = NOTHING
        self._sending: Moving = THROUGH

    # -- as an update sees it -----------------------------------------------------------------------------------------

    @property
    def master(self) -> WholeMaster:
        return WholeMaster(self.tensor, in_place=False)

    @property
    def full(self) -> Tensor:
        """Says where it is."""
        return self.tensor

    lazy = True
    grad: Tensor
    """in the master's type, while an update is made"""

    # -- for everybody else -------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong on the host."""
        self.turn.wait()
        self._sums.wait()

    @property
    def is_ready(self) -> bool:
        return self.turn.is_over

    def values(self, part: slice = EVERYTHING) -> Tensor:
        self.wait()
        return self.tensor[part]

    def set(self, start: int, values: Tensor) -> None:
        self.wait()
        self.tensor[start : start + len(values)] = values.to(self.tensor.device)
        self._stale = True

    def part(self, own: Tensor) -> Tensor:
        """This rank's part of the parameters on the device: it is there when `coming` is through."""
        self.turn.wait()
        if self._stale:
            (self.there if self.here is None else self.here).copy_(self.tensor)
            self._stale = False
        if self.here is not None:
            return self.here
        assert self.there is not None
        self.coming = self.host.link.up(self.there, own, "parameters")
        return own

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """This step's gradient, or what there is of it, is on the host and not on the device."""
        return self.own is not None and not self._fresh

    def gradient(self) -> Tensor:
        """The gradient that is on the host, as it is now."""
        self.wait()
        assert self.own is not None
        self._sending.done()
        return self.own

    def begin_step(self) -> None:
        self._fresh = True

    def send(self, gradient: Tensor) -> None:
        """The gradient of this step leaves the device. Whoever owns it may let go of it."""
        self.turn.wait()
        assert self.own is not None
        moving = self._sending = self.host.link.down(gradient, self.own, "gradients")
        self._fresh = False
        # Until the copy is through, its memory must not be given to anybody else.
        self._sums = self.host.worker.give(f"the gradient of {self.name}", lambda held=gradient: moving.done())

    def add(self, gradient: Tensor) -> None:
        """The gradient of a microbatch leaves the device, to be added to the others."""
        host, first = self.host, self._fresh
        self._fresh = False
        if first:
            self.turn.wait()
        room = host.rooms.take()
        there = room.of(gradient.numel(), gradient.dtype)
        moving = host.link.down(gradient, there, "gradients")
        own, rooms = self.own, host.rooms
        assert own is not None

        def put(held: Tensor = gradient) -> None:
            moving.done()
            own.copy_(there) if first else own.add_(there)
            rooms.give_back(room)

        self._sums = host.worker.give(f"the gradient of {self.name}", put)

    @property
    def name(self) -> str:
        return self.unit.name or "what is outside the layers"

    # -- for the worker -----------------------------------------------------------------------------------------------

    def publish(self, after: Moving) -> None:
        """The parameters follow from the master values: on their way to the device, or here to be fetched."""
        if self.here is None:
            assert self.there is not None
            self.there.copy_(self.tensor)
            return
        room = self.host.stages.take()
        staged = room.of(self.tensor.numel(), self.compute)
        staged.copy_(self.tensor)
        self.coming = self.host.link.up(staged, self.here, "parameters", after=after)
        self.host.stages.give_back(room, self.coming)


class HostMaster:
    """What a unit on the device sees of master values on the host (master.py)."""

    in_place = False

    def __init__(self, host: HostUnit):
        self.host, self.dtype = host, host.tensor.dtype

    def values(self, part: slice = EVERYTHING) -> Tensor:
        """As a step's update has left them."""
        return self.host.values(part)

    def set(self, start: int, values: Tensor) -> None:
        self.host.set(start, values)

    def part(self, own: Tensor) -> Tensor:
        """This rank's part of the parameters, to be gathered."""
        return self.host.part(own)

    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return (self.host.tensor,)
