"""The forms in which a saved tensor is kept. Each can make the tensor again, as often as it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask, blockwise_cast, pool_indices, sparse_values
from echelon.kernels.activations.blockwise_cast import BlockFormat
from echelon.kernels.activations.pool_indices import PoolWindow
from echelon.kernels.activations.sparse_values import NonzeroCount, SparseValues
from echelon.kernels.tensor_spec import TensorSpec, as_rows

MAX_SPARSE_SHARE = 0.9
"""of what all values would take, where only those that are not zero are kept"""


class SavedTensorFormat(Protocol):
    def restore(self) -> Tensor: ...

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps alive."""
        ...


@dataclass(frozen=True, eq=False)
class UncompressedTensor:
    """As it is."""

    tensor: Tensor
    version: int
    is_counted: bool = True
    """it is no parameter, which is there anyway"""

    @property
    def is_modified(self) -> bool:
        return self.tensor._version != self.version

    def restore(self) -> Tensor:
        if self.is_modified:
            raise RuntimeError(
                f"a tensor that backward needs was changed in place after forward read it ({tuple(self.tensor.shape)}, "
                f"version {self.tensor._version} instead of {self.version}); use the operation that makes a new tensor"
            )
        return self.tensor

    def tensors(self) -> Iterator[Tensor]:
        if self.is_counted:
            yield self.tensor


@dataclass(frozen=True, eq=False)
class SpecOnlyTensor:
    """Only how it lay: its values are never read."""

    spec: TensorSpec

    def restore(self) -> Tensor:
        return self.spec.empty()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


@dataclass(frozen=True, eq=False)
class BitmaskTensor:
    """True and false, as bits."""

    spec: TensorSpec
    bits: Tensor

    @classmethod
    def from_tensor(cls, x: Tensor) -> BitmaskTensor:
        return cls(TensorSpec.from_tensor(x), bitmask.pack(as_rows(x)))

    def restore(self) -> Tensor:
        out = self.spec.empty()
        bitmask.unpack(self.bits, as_rows(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield self.bits


@dataclass(frozen=True, eq=False)
class PoolIndexTensor:
    """Indices of maxima, as places in their windows."""

    codes: Tensor
    window: PoolWindow

    def restore(self) -> Tensor:
        return pool_indices.decode(self.codes, self.window)

    def tensors(self) -> Iterator[Tensor]:
        yield self.codes


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Values in fewer bits."""

    spec: TensorSpec
    codes: Tensor
    scales: Tensor
    block_format: BlockFormat

    @classmethod
    def from_tensor(cls, x: Tensor, block_format: BlockFormat) -> QuantizedTensor:
        return cls(TensorSpec.from_tensor(x), *blockwise_cast.encode(as_rows(x), block_format), block_format)

    def restore(self) -> Tensor:
        out = self.spec.empty()
        blockwise_cast.decode(self.codes, self.scales, self.block_format, as_rows(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.codes, self.scales)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """What is not zero, in its own type or in fewer bits."""

    spec: TensorSpec
    bits: Tensor
    values: SparseValues
    block_format: BlockFormat | None

    def restore(self) -> Tensor:
        out = self.spec.empty()
        sparse_values.expand(self.values, self.bits, self.block_format, as_rows(out))
        return out

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.bits, self.values.values, self.values.scales, self.values.block_ends)


@dataclass(eq=False)
class ReluOutputTensor:
    """ReLU's output: as it is until it is known how many of its values are not zero, then in fewer bytes if it can be.

    Who waited for the number at once would let the device run dry. So it is asked for here, and whoever has given the
    device more to do calls `settle`.
    """

    current: SavedTensorFormat
    bits: Tensor
    count: NonzeroCount
    block_format: BlockFormat | None

    @classmethod
    def from_output(
        cls, output: UncompressedTensor, bits: Tensor, counts: Tensor, block_format: BlockFormat | None
    ) -> ReluOutputTensor:
        return cls(
            output, bits, sparse_values.count_nonzero(bits, counts, as_rows(output.tensor).shape[1]), block_format
        )

    def compress(self) -> None:
        if (
            not isinstance(self.current, UncompressedTensor) or self.current.is_modified
        ):  # which is an error, and told where it is read
            return
        x, total = self.current.tensor, self.count.wait()
        if total < MAX_SPARSE_SHARE * x.numel():
            values = sparse_values.compact(as_rows(x), self.bits, total, self.count.block_ends, self.block_format)
            self.current = SparseTensor(TensorSpec.from_tensor(x), self.bits, values, self.block_format)
        elif self.block_format is not None:
            self.current = QuantizedTensor.from_tensor(x, self.block_format)

    def restore(self) -> Tensor:
        return self.current.restore()

    def tensors(self) -> Iterator[Tensor]:
        return self.current.tensors()


@dataclass(frozen=True, eq=False)
class StoredView:
    """All of a tensor that is stored, seen in another shape."""

    base: SavedTensorFormat
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        return self.base.restore().as_strided(self.size, self.stride)

    def tensors(self) -> Iterator[Tensor]:
        return self.base.tensors()


def total_bytes(stored: Iterator[SavedTensorFormat]) -> int:
    """What the forms keep alive, every storage once."""
    found: dict[int, int] = {}
    for one in stored:
        for tensor in one.tensors():
            storage: torch.UntypedStorage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
