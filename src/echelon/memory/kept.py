"""How the input of a layer that is repeated is kept until then.

    whole       as it is
    partition   1/n of it on each of n ranks that have the same (ZeRO-R's Pa): gathered before the layer is repeated
    arena       copied into memory that was set aside for it (ZeRO-R's Md): see [Note: an arena]

[Note: an arena]

Inputs live from forward to backward, and between two of them a layer makes and frees a hundred short-lived tensors.
Where all come from one allocator, the long-lived ones end up strewn among holes. In an arena they lie side by side, in
blocks that are made once and used again in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.memory.repeats import partitioned

if TYPE_CHECKING:
    from echelon.parallel.axis import Axis

Kept = tuple[Tensor, Callable[[Tensor], Tensor]]
"""what is kept, and how the input comes of it"""
Keep = Callable[[Tensor], Kept]


def whole(tensor: Tensor) -> Kept:
    return tensor, _same


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Partition:
    """A slice on each rank of `axis`, which all have the same tensor."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def __call__(self, tensor: Tensor) -> Kept:
        size = partitioned(tensor.numel(), self.axis.size)
        flat, start = tensor.reshape(-1), self.axis.index * size
        part = flat.new_zeros(size)
        mine = flat[start : start + size]
        part[: len(mine)].copy_(mine)
        shape = tensor.shape

        def back(part: Tensor) -> Tensor:
            gathered = part.new_empty(size * self.axis.size)
            self.axis.start_all_gather(gathered, part).wait()
            return gathered[: shape.numel()].view(shape)

        return part, back


class Arena:
    """Memory set aside for inputs. Blocks hold `places` inputs each; one more is made where they do not suffice."""

    def __init__(self, places: int, inner: Keep = whole):
        self.places, self.inner = max(places, 1), inner
        self.blocks: list[Tensor] = []
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Kept:
        stored, inner_back = self.inner(tensor)
        free = self._free.setdefault((stored.numel(), stored.dtype, stored.device), [])
        if not free:
            block = torch.empty(self.places, stored.numel(), dtype=stored.dtype, device=stored.device)
            self.blocks.append(block)
            free += [row.data for row in reversed(block.unbind(0))]  # each with a version of its own
        lease = _Lease()
        place = free.pop()
        weakref.finalize(lease, free.append, place)
        place.copy_(stored.reshape(-1))
        shape = stored.shape

        def back(kept: Tensor, _lease: _Lease = lease) -> Tensor:
            # Who repeats a layer may hold its input longer than the place is his: he gets one of his own.
            found = kept.view(shape)
            return found.clone() if inner_back is _same else inner_back(found)

        return place, back

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def in_use(self) -> int:
        """places"""
        return len(self.blocks) * self.places - sum(len(free) for free in self._free.values())


class _Lease:
    """Held by whoever may still ask for an input; with it goes the right to the place."""
