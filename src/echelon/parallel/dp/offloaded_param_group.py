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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.layout.placement import Unit
from echelon.memory.offload.disk_store import Disk, Store
from echelon.memory.offload.host_transfer import THROUGH, Link, Moving, Room, Rooms
from echelon.memory.offload.host_worker import NOTHING, Turn, Worker
from echelon.parallel.dp.master_weights import EVERYTHING, WholeMaster
from echelon.parallel.dp.zero import Policy

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
    read: Rooms
    """for parameters that are read ahead from disk"""
    paged: bool
    """parameters and gradients live here too"""
    disk: Disk | None = None
    """where files hold what would be here"""

    @classmethod
    def of(
        cls, link: Link, units: Sequence[Unit], *, master_bytes: int, compute_bytes: int, paged: bool, disk: Disk | None
    ) -> Host:
        masters, parts = (
            max(unit.shard_numel * unit.bytes_of(size) for unit in units) for size in (master_bytes, compute_bytes)
        )
        worker = Worker("echelon-host")
        worker.give("finding its device", link.enter)
        return cls(
            link=link,
            worker=worker,
            rooms=Rooms(link, ROOMS, masters),
            stages=Rooms(link, STAGES, parts),
            read=Rooms(link, ROOMS, parts),
            paged=paged,
            disk=disk,
        )


def buffer_bytes(largest: int, master: torch.dtype, compute: torch.dtype) -> int:
    """What units share on the host, where nothing is on disk."""
    return largest * (ROOMS * master.itemsize + STAGES * compute.itemsize)


class HostUnit:
    """The host's side of one unit."""

    def __init__(
        self,
        unit: Unit,
        policy: Policy,
        host: Host,
        *,
        here: Tensor | None,
        compute: torch.dtype,
        master: torch.dtype,
        gradient_type: torch.dtype,
        early: bool,
    ):
        self.unit, self.policy, self.host = unit, policy, host
        self.compute, self.arrives_in = compute, gradient_type
        self.tensor = torch.zeros(unit.shard_numel, dtype=master)
        """master values"""
        self.here = here
        """on the device, this rank's part of the parameters; none where they are paged"""
        self.there: Tensor | None = None
        """that part on the host, where it is not on the device"""
        if here is None and host.disk is None:
            self.there = host.link.room(unit.shard_numel, compute)
        self.store: Store | None = None
        """master values and whatever the optimizer keeps, on disk"""
        self.parts: Store | None = None
        """the part of the parameters, on disk"""
        if host.disk is not None:
            self.store = host.disk.store(f"{self._file}.states")
            self.store.reserve(self.tensor.nbytes)
            if here is None:
                self.parts = host.disk.store(f"{self._file}.part")
                self.parts.reserve(unit.shard_numel * compute.itemsize)
        self.states: Callable[[], list[Tensor]] = list
        """what the optimizer keeps of it, element by element"""
        self.followers: list[Callable[[], None]] = []
        """what the worker does after each update of it"""
        self.early = early
        """its gradient comes once a step, as it is used: it leaves the device as soon as it is there"""
        self.own: Tensor | None = None
        """a gradient of its own: the one that came early, or the sum over microbatches"""
        if early:
            self.own = host.link.room(unit.shard_numel, gradient_type)
        elif host.paged:
            self.own = torch.zeros(unit.shard_numel, dtype=master)
        self.turn: Turn = NOTHING
        """its own part of the update that is under way"""
        self.job: Turn = NOTHING
        """the whole of it"""
        self.coming: Moving = THROUGH
        """the part of the parameters on its way up"""
        self._stale = True
        self._fresh = True
        self._sums: Turn = NOTHING
        self._sending: Moving = THROUGH
        self._reading: tuple[Room, Turn] | None = None

    # -- as an update sees it -----------------------------------------------------------------------------------------

    @property
    def master(self) -> WholeMaster:
        return WholeMaster(self.tensor, in_place=False)

    @property
    def full(self) -> Tensor:
        """Says where it is."""
        return self.tensor

    @property
    def gradient_type(self) -> torch.dtype:
        """While an update is made: a gradient that came in a shorter type has been cast."""
        return self.tensor.dtype

    lazy = True
    grad: Tensor
    """in the master's type, while an update is made"""

    # -- for everybody else -------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong on the host."""
        self.turn.wait()
        self.job.wait()
        self._sums.wait()

    def is_ready(self) -> bool:
        """Its values are here. Where they are on disk, they are asked for."""
        if not self.turn.is_over:
            return False
        if self.parts is None:
            return True
        if self._reading is None and (room := self.host.read.take_if_free()) is not None:
            assert self.host.disk is not None
            job = partial(self.parts.load, [room.of(self.unit.shard_numel, self.compute)])
            self._reading = room, self.host.disk.reader.give(f"reading {self.name}", job)
        return self._reading is not None and self._reading[1].is_over

    def forget(self) -> None:
        """What was read ahead and not used, for a layer that was not called, is old when the values change."""
        if self._reading is not None:
            room, reading = self._reading
            self._reading = None
            reading.wait()
            self.host.read.give_back(room)

    def values(self, part: slice = EVERYTHING) -> Tensor:
        """The master values; a copy, where they are on disk."""
        self.wait()
        return (self.tensor if self.store is None else self.loaded()[0])[part]

    def set(self, start: int, values: Tensor) -> None:
        """Some master values; `rest` when all are set."""
        self.wait()
        if self.store is not None and not self._stale:
            self.bring()
        self.hold()
        self.tensor[start : start + len(values)] = values.to(self.tensor.device)
        self._stale = True

    def rest(self) -> None:
        """What was set goes where it lives."""
        if self.store is None or not self._stale:
            return
        self._stale = False
        if self.here is not None:
            self.coming.wait()  # older values may still be on their way there
            self.here.copy_(self.tensor)
        elif self.parts is not None:
            self.parts.save([self.tensor.to(self.compute)])
            self.parts.commit()
        self.put_away()
        self.store.commit()

    # -- disk ---------------------------------------------------------------------------------------------------------

    def on_disk(self) -> list[Tensor]:
        """In the order of the file."""
        return [self.tensor, *self.states()]

    def loaded(self) -> list[Tensor]:
        """What is in the file, as copies."""
        assert self.store is not None
        found = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in self.on_disk()]
        self.store.load(found)
        return found

    def bring(self) -> None:
        """From disk into memory."""
        assert self.store is not None
        self.hold()
        self.store.load(self.on_disk())

    def hold(self) -> None:
        """Memory for what is on disk."""
        for tensor in self.on_disk():
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)

    def put_away(self) -> None:
        """From memory to disk."""
        assert self.store is not None
        tensors = self.on_disk()
        self.store.reserve(sum(tensor.nbytes for tensor in tensors))
        self.store.save(tensors)
        self.let_go()

    def let_go(self) -> None:
        """Of the memory of what is on disk."""
        for tensor in self.on_disk() if self.store is not None else ():
            tensor.untyped_storage().resize_(0)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """What is on disk is in memory, to be read and changed."""
        self.wait()
        if self.store is None:
            yield
            return
        self.bring()
        try:
            yield
        finally:
            self.put_away()
            self.store.commit()

    @property
    def _file(self) -> str:
        return self.unit.name.replace("/", "_") or "outside"

    # -- parameters ---------------------------------------------------------------------------------------------------

    def part(self, own: Tensor) -> Tensor:
        """This rank's part of the parameters on the device: it is there when `coming` is through."""
        self.turn.wait()
        if self._stale:
            place = self.there if self.here is None else self.here
            assert place is not None
            self.coming.done()  # a copy from before may still be on its way, and read what this thread writes
            place.copy_(self.tensor)
            self._stale = False
        if self.here is not None:
            return self.here
        link = self.host.link
        if self.parts is None:
            assert self.there is not None
            self.coming = link.up(self.there, own, "parameters")
            return own
        room, reading = self._reading or (None, NOTHING)
        reading.wait()
        rooms = self.host.read
        if room is None:  # all rooms were full
            room, rooms = self.host.stages.take(), self.host.stages
            self.parts.load([room.of(self.unit.shard_numel, self.compute)])
        self.coming = link.up(room.of(self.unit.shard_numel, self.compute), own, "parameters")
        rooms.give_back(room, self.coming)
        self._reading = None
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
        self._sums = self.host.worker.give(f"the gradient of {self.name}", partial(_hold_until, moving, gradient))

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

    def followed(self) -> None:
        for follow in self.followers:
            follow()

    def publish(self, after: Moving) -> None:
        """The parameters follow from the master values: on their way to the device, or here to be fetched."""
        if self.there is not None:
            self.there.copy_(self.tensor)
            return
        room = self.host.stages.take()
        staged = room.of(self.tensor.numel(), self.compute)
        staged.copy_(self.tensor)
        if self.parts is not None:
            self.parts.save([staged])
            self.host.stages.give_back(room)
            return
        assert self.here is not None
        self.coming = self.host.link.up(staged, self.here, "parameters", after=after)
        self.host.stages.give_back(room, self.coming)


def _hold_until(moving: Moving, _held: Tensor) -> None:
    moving.done()


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
