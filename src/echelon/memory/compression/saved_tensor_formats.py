"""Formats in which saved tensors are stored. Each can restore the tensor, any number of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask, blockwise_cast, max_pool, sparse_values
from echelon.kernels.activations.blockwise_cast import BlockFormat
from echelon.kernels.activations.max_pool import PoolWindow
from echelon.kernels.activations.sparse_values import NonzeroCount, SparseValues
from echelon.kernels.tensor_spec import TensorSpec, as_rows

MAX_SPARSE_SHARE = 0.9
"""store only nonzeros below this share of them"""


class SavedTensorFormat(Protocol):
    """A stored tensor."""

    def restore(self) -> Tensor: ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it keeps alive."""
        ...


@dataclass(frozen=True, eq=False)
class UncompressedTensor:
    """The tensor itself."""

    tensor: Tensor
    version: int
    is_counted: bool = True
    """False for parameters, which are in memory anyway"""

    @property
    def is_modified(self) -> bool:
        return self.tensor._version != self.version

    def restore(self) -> Tensor:
        if self.is_modified:
            raise RuntimeError(
                f"a tensor that backward needs was modified in place after forward ({tuple(self.tensor.shape)}, "
                f"version {self.tensor._version} instead of {self.version}); use an out-of-place operator"
            )
        return self.tensor

    def tensors(self) -> Iterator[Tensor]:
        if self.is_counted:
            yield self.tensor


@dataclass(frozen=True, eq=False)
class SpecOnlyTensor:
    """A tensor whose values backward never reads: its spec only."""

    spec: TensorSpec

    def restore(self) -> Tensor:
        return self.spec.empty()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


@dataclass(frozen=True, eq=False)
class BitmaskTensor:
    """A boolean tensor, as bits."""

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
    """Max-pool indices, as positions in their windows."""

    codes: Tensor
    window: PoolWindow

    def restore(self) -> Tensor:
        return max_pool.decode(self.codes, self.window)

    def tensors(self) -> Iterator[Tensor]:
        yield self.codes


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Values in a low-precision format."""

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
    """Nonzeros, in their dtype or in a low-precision format."""

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
    """A ReLU output: as it is until its nonzeros are counted, then compressed if that saves memory.

    Waiting for the count at once would let the device idle. So it is copied asynchronously, and `compress` is called
    when more work is queued on the device.
    """

    current: SavedTensorFormat
    bits: Tensor
    count: NonzeroCount
    block_format: BlockFormat | None

    def compress(self) -> None:
        if not isinstance(self.current, UncompressedTensor) or self.current.is_modified:
            return  # a modified tensor is an error, which `restore` raises
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
    """A view of another stored tensor, of all its elements."""

    base: SavedTensorFormat
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        return self.base.restore().as_strided(self.size, self.stride)

    def tensors(self) -> Iterator[Tensor]:
        return self.base.tensors()


def total_bytes(stored: Iterator[SavedTensorFormat]) -> int:
    """Return the bytes that formats keep alive, every storage once."""
    sizes: dict[int, int] = {}
    for one in stored:
        for tensor in one.tensors():
            storage: torch.UntypedStorage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
