"""The forms in which a saved tensor is kept. Each can make the tensor again, as often as it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask, blockwise_cast, pool_indices, sparse_values
from echelon.kernels.activations.blockwise_cast import Kind
from echelon.kernels.activations.pool_indices import Window
from echelon.kernels.activations.sparse_values import Count, Values
from echelon.kernels.tensor_spec import Lying, rows_of

SPARSE_BELOW = 0.9
"""of what all values would take, where only those that are not zero are kept"""


class Stored(Protocol):
    def restore(self) -> Tensor: ...

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps alive."""
        ...


@dataclass(frozen=True, eq=False)
class Kept:
    """As it is."""

    tensor: Tensor
    version: int
    counts: bool = True
    """it is no parameter, which is there anyway"""

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version

    def restore(self) -> Tensor:
        if self.changed:
            raise RuntimeError(
                f"a tensor that backward needs was changed in place after forward read it ({tuple(self.tensor.shape)}, "
                f"version {self.tensor._version} instead of {self.version}); use the operation that makes a new tensor"
            )
        return self.tensor

    def tensors(self) -> Iterator[Tensor]:
        if self.counts:
            yield self.tensor


@dataclass(frozen=True, eq=False)
class Shape:
    """Only how it lay: its values are never read."""

    lying: Lying

    def restore(self) -> Tensor:
        return self.lying.empty()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


@dataclass(frozen=True, eq=False)
class Flags:
    """True and false, as bits."""

    lying: Lying
    bits: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Flags:
        return cls(Lying.of(x), bitmask.pack(rows_of(x)))

    def restore(self) -> Tensor:
        out = self.lying.empty()
        bitmask.unpack(self.bits, rows_of(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield self.bits


@dataclass(frozen=True, eq=False)
class Places:
    """Indices of maxima, as places in their windows."""

    codes: Tensor
    window: Window

    def restore(self) -> Tensor:
        return pool_indices.decode(self.codes, self.window)

    def tensors(self) -> Iterator[Tensor]:
        yield self.codes


@dataclass(frozen=True, eq=False)
class Narrow:
    """Values in fewer bits."""

    lying: Lying
    codes: Tensor
    scales: Tensor
    kind: Kind

    @classmethod
    def of(cls, x: Tensor, kind: Kind) -> Narrow:
        return cls(Lying.of(x), *blockwise_cast.encode(rows_of(x), kind), kind)

    def restore(self) -> Tensor:
        out = self.lying.empty()
        blockwise_cast.decode(self.codes, self.scales, self.kind, rows_of(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.codes, self.scales)


@dataclass(frozen=True, eq=False)
class Sparse:
    """What is not zero, in its own type or in fewer bits."""

    lying: Lying
    bits: Tensor
    values: Values
    kind: Kind | None

    def restore(self) -> Tensor:
        out = self.lying.empty()
        sparse_values.expand(self.values, self.bits, self.kind, rows_of(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.bits, self.values.values, self.values.scales, self.values.ends)


@dataclass(eq=False)
class Rectified:
    """ReLU's output: as it is until it is known how many of its values are not zero, then in fewer bytes if it can be.

    Who waited for the number at once would let the device run dry. So it is asked for here, and whoever has given the
    device more to do calls `settle`.
    """

    now: Stored
    bits: Tensor
    count: Count
    kind: Kind | None

    @classmethod
    def of(cls, whole: Kept, bits: Tensor, counts: Tensor, kind: Kind | None) -> Rectified:
        return cls(whole, bits, sparse_values.count(bits, counts, rows_of(whole.tensor).shape[1]), kind)

    def settle(self) -> None:
        if not isinstance(self.now, Kept) or self.now.changed:  # which is an error, and told where it is read
            return
        x, total = self.now.tensor, self.count.wait()
        if total < SPARSE_BELOW * x.numel():
            values = sparse_values.compact(rows_of(x), self.bits, total, self.count.ends, self.kind)
            self.now = Sparse(Lying.of(x), self.bits, values, self.kind)
        elif self.kind is not None:
            self.now = Narrow.of(x, self.kind)

    def restore(self) -> Tensor:
        return self.now.restore()

    def tensors(self) -> Iterator[Tensor]:
        return self.now.tensors()


@dataclass(frozen=True, eq=False)
class View:
    """All of a tensor that is stored, seen in another shape."""

    whole: Stored
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        return self.whole.restore().as_strided(self.size, self.stride)

    def tensors(self) -> Iterator[Tensor]:
        return self.whole.tensors()


def total_bytes(stored: Iterator[Stored]) -> int:
    """What the forms keep alive, every storage once."""
    found: dict[int, int] = {}
    for one in stored:
        for tensor in one.tensors():
            storage: torch.UntypedStorage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
