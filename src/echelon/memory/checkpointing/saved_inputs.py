"""How the input of a checkpointed segment is saved until its rerun.

    as is       the tensor itself
    partition   1/n of it on each of n ranks that have the same (ZeRO-R's Pa): activation_checkpointing.py
    arena       copied into preallocated memory (ZeRO-R's Md): see [Note: an arena]

[Note: an arena]

Inputs live from forward to backward, and between two of them a layer allocates and frees a hundred short-lived tensors.
From one allocator, the long-lived ones end up scattered among holes. In an arena they are adjacent, in blocks that are
allocated once and reused in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

SavedInput = tuple[Tensor, Callable[[Tensor], Tensor]]
"""(what is saved, a function that restores the input from it)"""
SaveInput = Callable[[Tensor], SavedInput]


def save_as_is(tensor: Tensor) -> SavedInput:
    """Save the input itself."""
    return tensor, identity


def identity(tensor: Tensor) -> Tensor:
    """Restore an input that was saved as it is."""
    return tensor


class InputArena:
    """Preallocated memory for `capacity` inputs at once; allocates another block where they do not suffice.

    A slot holds any input up to the longest so far: sequences of different lengths share one block.
    """

    def __init__(self, capacity: int, inner: SaveInput = save_as_is):
        self.capacity, self.inner = max(capacity, 1), inner
        self._pools: dict[tuple[torch.dtype, torch.device], _ArenaPool] = {}

    def __call__(self, tensor: Tensor) -> SavedInput:
        stored, inner_restore = self.inner(tensor)
        key = (stored.dtype, stored.device)
        if key not in self._pools or self._pools[key].length < stored.numel():
            # Shorter slots are freed with their leases.
            self._pools[key] = _ArenaPool(self.capacity, stored)
        lease, slot = self._pools[key].lease()
        saved, shape = slot[: stored.numel()], stored.shape
        saved.copy_(stored.reshape(-1))

        def restore(saved: Tensor, _lease: _Lease = lease) -> Tensor:
            # A rerun may hold its input longer than the slot is leased: it gets a copy.
            restored = saved.view(shape)
            return restored.clone() if inner_restore is identity else inner_restore(restored)

        return saved, restore

    @property
    def blocks(self) -> list[Tensor]:
        return [block for pool in self._pools.values() for block in pool.blocks]

    @property
    def num_in_use(self) -> int:
        """slots that are leased"""
        return sum(len(pool.blocks) * self.capacity - len(pool.free) for pool in self._pools.values())


class _Lease:
    """Held while an input may still be restored; its end frees the slot."""


class _ArenaPool:
    """Slots of one length."""

    def __init__(self, capacity: int, like: Tensor):
        self.capacity, self.length, self._like = capacity, like.numel(), like.new_empty(0)
        self.blocks: list[Tensor] = []
        self.free: list[Tensor] = []

    def lease(self) -> tuple[_Lease, Tensor]:
        if not self.free:
            block = self._like.new_empty(self.capacity, self.length)
            self.blocks.append(block)
            self.free += [row.data for row in reversed(block.unbind(0))]  # each with its own version counter
        lease, slot = _Lease(), self.free.pop()
        weakref.finalize(lease, self.free.append, slot)
        return lease, slot
