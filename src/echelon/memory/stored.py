"""The forms in which a saved tensor is kept. Each can make the tensor again, as often as it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon.kernels import bits, blockwise, places, sparse
from echelon.kernels.blockwise import Kind
from echelon.kernels.lying import Lying, rows_of
from echelon.kernels.places import Window
from echelon.kernels.sparse import Values


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

    def restore(self) -> Tensor:
        if self.tensor._version != self.version:
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
        return cls(Lying.of(x), bits.pack(rows_of(x)))

    def restore(self) -> Tensor:
        out = self.lying.empty()
        bits.unpack(self.bits, rows_of(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield self.bits


@dataclass(frozen=True, eq=False)
class Places:
    """Indices of maxima, as places in their windows."""

    codes: Tensor
    window: Window

    def restore(self) -> Tensor:
        return places.decode(self.codes, self.window)

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
        return cls(Lying.of(x), *blockwise.encode(rows_of(x), kind), kind)

    def restore(self) -> Tensor:
        out = self.lying.empty()
        blockwise.decode(self.codes, self.scales, self.kind, rows_of(out))
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
        sparse.expand(self.values, self.bits, self.kind, rows_of(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.bits, self.values.values, self.values.scales, self.values.ends)


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
