"""Activations on the host between forward and backward: `offload=activations`.

[Note: layer by layer]

    forward       layer 0      layer 1      layer 2      layer 3          backward    layer 3      layer 2      layer 1
    down                       | 0's kept   | 1's kept   | 2's kept
    up                                                                                | 2's        | 1's        | 0's

What backward reads of a layer goes down while the next layer computes, and its memory is free when the one after that
begins. When a layer's backward begins, what the layer before it needs comes back. So the device holds about two layers'
worth. The last layer's stays: backward begins with it. (In a pipeline other microbatches come first, and it goes too.)

torch's hooks for saved tensors see what autograd keeps inside a layer: of a layer that is recomputed, its input. Each
storage goes once, however many views of it are kept. Parameters stay, and so does what is small. Memory on the host is
used again from step to step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from echelon.memory.offload.host_transfer import THROUGH, Link, Moving, Room

SMALL = {"cuda": 1 << 20, "cpu": 1 << 10}
"""bytes of a storage that is not worth a copy"""


class Pool:
    """Rooms on the host by their size, used again."""

    def __init__(self, link: Link):
        self.link = link
        self.nbytes = 0
        self._free: dict[int, list[Room]] = {}

    def take(self, nbytes: int) -> Room:
        free = self._free.get(nbytes)
        if not free:
            self.nbytes += nbytes
            return Room(self.link.room(nbytes, torch.uint8))
        room = free.pop()
        room.moving.wait()  # a copy into it comes after what this thread has queued
        return room

    def give_back(self, room: Room, moving: Moving) -> None:
        room.moving = moving
        self._free.setdefault(len(room.memory), []).append(room)


class Kept:
    """One storage on the host. It lives as long as autograd keeps a view of it."""

    def __init__(self, pool: Pool, storage: torch.UntypedStorage):
        self._pool, self._room = pool, pool.take(storage.nbytes())
        self.down = pool.link.down(_bytes(storage), self._room.memory, "activations")
        self._up = THROUGH
        self._back: Tensor | None = None

    def fetch(self) -> None:
        """Starts on its way to the device."""
        if self._back is None:
            link = self._pool.link
            self._back = torch.empty(len(self._room.memory), dtype=torch.uint8, device=link.device)
            self._up = link.up(self._room.memory, self._back, "activations")

    def back(self) -> torch.UntypedStorage:
        self.fetch()
        self._up.wait()
        assert self._back is not None
        return self._back.untyped_storage()

    def __del__(self) -> None:
        # What came back and was never read: its memory must not be given away while it comes.
        self._up.wait()
        self._pool.give_back(self._room, self._up)


@dataclass(frozen=True)
class View:
    """What autograd holds in place of a tensor."""

    kept: Kept
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        storage = self.kept.back()
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.size, self.stride)


class Pass:
    """One microbatch's way through layers that follow each other: what each has sent."""

    def __init__(self) -> None:
        self.layers: list[weakref.WeakSet[Kept]] = []

    def fetch(self, place: int) -> None:
        """What a layer needs comes back."""
        for kept in self.layers[place] if place >= 0 else ():
            kept.fetch()


class Stash:
    """Sends away what the layers of a rank keep."""

    def __init__(self, link: Link, *, last_stays: bool):
        self.link, self.pool = link, Pool(link)
        self._small, self._last_stays = SMALL[link.device.type], last_stays
        self._parameters: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, weakref.ref[Kept]]] = (
            weakref.WeakKeyDictionary()
        )
        self._leaving: deque[list[tuple[Moving, torch.UntypedStorage]]] = deque()
        """by layer: storages that must not be given to anybody else until their copies are through"""
        self._pass, self._at = Pass(), -2

    def apply(self, model: nn.Module, names: Sequence[str]) -> None:
        """Around the forward of each layer, in their order."""
        found = [(index, model.get_submodule(name)) for index, name in enumerate(names)]
        mine: list[tuple[int, Any]] = [(at, module) for at, module in found if not isinstance(module, nn.Identity)]
        for at, module in mine[: len(mine) - self._last_stays]:
            module.forward = partial(self._layer, at, module.forward)
        for at, module in mine[len(mine) - self._last_stays :]:
            module.forward = partial(self._last, at, module.forward)

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Parameters: they are not sent."""
        for tensor in tensors:
            self._parameters.add(tensor.untyped_storage())

    def _layer(self, at: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        self._enter(at)
        with saved_tensors_hooks(self._pack, _unpack):
            output = forward(*args, **named)
        return self._hooked(output)

    def _last(self, at: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        self._enter(at)
        return self._hooked(forward(*args, **named))

    def _enter(self, at: int) -> None:
        if at != self._at + 1:
            self._pass = Pass()
        self._at = at
        self._pass.layers.append(weakref.WeakSet())
        self._leaving.append([])
        while len(self._leaving) > 2:
            for moving, _ in self._leaving.popleft():
                moving.wait()

    def _hooked(self, output: Any) -> Any:
        """When the layer's backward begins, what the layer before it needs comes back."""
        passing, place = self._pass, len(self._pass.layers) - 1

        def before_backward(_gradient: Tensor) -> None:
            self._settle()
            passing.fetch(place)
            passing.fetch(place - 1)

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)
        return output

    def _settle(self) -> None:
        """Nothing is leaving: memory of what has left is free."""
        while self._leaving:
            for moving, _ in self._leaving.popleft():
                moving.wait()

    def _pack(self, tensor: Tensor) -> Tensor | View:
        # What stays is kept without its history: its maker, which may be what saves it, would keep itself alive.
        here = tensor if tensor.is_leaf else tensor.detach()
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.device != self.link.device:
            return here
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._small or storage in self._parameters:
            return here
        version, known = self._known.get(storage, (-1, None))
        kept = known() if known is not None and version == tensor._version else None
        if kept is None:
            kept = Kept(self.pool, storage)
            self._known[storage] = tensor._version, weakref.ref(kept)
            self._leaving[-1].append((kept.down, storage))
            self._pass.layers[-1].add(kept)
        return View(kept, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(packed: Tensor | View) -> Tensor:
    return packed.tensor() if isinstance(packed, View) else packed


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
