"""How the input of a layer that is repeated is kept until then.

    whole       as it is
    partition   1/n of it on each of n ranks that have the same (ZeRO-R's Pa): parallel/activation_checkpointing.py
    arena       copied into memory that was set aside for it (ZeRO-R's Md): see [Note: an arena]

[Note: an arena]

Inputs live from forward to backward, and between two of them a layer makes and frees a hundred short-lived tensors.
Where all come from one allocator, the long-lived ones end up strewn among holes. In an arena they lie side by side, in
blocks that are made once and used again in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

SavedInput = tuple[Tensor, Callable[[Tensor], Tensor]]
"""what is kept, and how the input comes of it"""
SaveInput = Callable[[Tensor], SavedInput]


def save_as_is(tensor: Tensor) -> SavedInput:
    return tensor, identity


def identity(tensor: Tensor) -> Tensor:
    """What is kept is the input."""
    return tensor


class InputArena:
    """Memory set aside for inputs, for `places` of them at once; one more block is made where they do not suffice.

    A place takes any input up to the longest that came so far: where sequences differ in length, there is one block for
    all of them.
    """

    def __init__(self, capacity: int, inner: SaveInput = save_as_is):
        self.capacity, self.inner = max(capacity, 1), inner
        self._pools: dict[tuple[torch.dtype, torch.device], _ArenaPool] = {}

    def __call__(self, tensor: Tensor) -> SavedInput:
        stored, inner_back = self.inner(tensor)
        key = (stored.dtype, stored.device)
        if key not in self._pools or self._pools[key].length < stored.numel():
            # What is left of shorter places goes when those who hold them do.
            self._pools[key] = _ArenaPool(self.capacity, stored)
        lease, place = self._pools[key].lease()
        kept, shape = place[: stored.numel()], stored.shape
        kept.copy_(stored.reshape(-1))

        def back(kept: Tensor, _lease: _Lease = lease) -> Tensor:
            # Who repeats a layer may hold its input longer than the place is his: he gets one of his own.
            found = kept.view(shape)
            return found.clone() if inner_back is identity else inner_back(found)

        return kept, back

    @property
    def blocks(self) -> list[Tensor]:
        return [block for pool in self._pools.values() for block in pool.blocks]

    @property
    def num_in_use(self) -> int:
        """places"""
        return sum(len(pool.blocks) * self.capacity - len(pool.free) for pool in self._pools.values())


class _Lease:
    """Held by whoever may still ask for an input; with it goes the right to the place."""


class _ArenaPool:
    """Places of one length."""

    def __init__(self, capacity: int, like: Tensor):
        self.capacity, self.length, self._like = capacity, like.numel(), like.new_empty(0)
        self.blocks: list[Tensor] = []
        self.free: list[Tensor] = []

    def lease(self) -> tuple[_Lease, Tensor]:
        if not self.free:
            block = self._like.new_empty(self.capacity, self.length)
            self.blocks.append(block)
            self.free += [row.data for row in reversed(block.unbind(0))]  # each with a version of its own
        lease, place = _Lease(), self.free.pop()
        weakref.finalize(lease, self.free.append, place)
        return lease, place
