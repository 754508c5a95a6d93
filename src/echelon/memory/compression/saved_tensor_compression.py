"""Compression of what forward leaves for backward, in the manner of Gist (Jain et al., ISCA 2018), for any model.

[Note: who reads a saved tensor]

Autograd's hooks on saved tensors see every tensor that is saved, but not for whom. Two things are known beside them:

    a mode over torch's functions sees each call of ReLU and of a pooling, whatever module makes it
    a tensor that our ReLU made carries its bits, so whoever saves it later is known to save a ReLU's output

1. ReLU's backward needs which elements are above zero: a bit each, written by its forward (kernels/activations/bitmask.py).
2. Poolings save their input, of which backward only needs the shape; max pooling saves indices of 8 bytes, of which
   one byte, the place inside the window, says as much.
3. Whoever else saves a ReLU's output (a convolution, a product) needs its values: those that are not zero, side by
   side, with the bits of 1 to say where they belong.
4. Masks are kept as bits.
5. Other values are kept as they are, or with delayed precision reduction in fewer bits. Forward has computed with all
   of theirs; only backward reads rounded ones. Values of 3 are rounded likewise.

1 to 4 give backward what it would have read, bit by bit. Left alone are parameters, what has no gradient (inputs,
tables), small tensors, and logarithms of probabilities: backward raises those to powers of e, so that rounding them by
a few hundredths would change every gradient by as much. A tensor that is saved several times is stored once.

[Note: hooks inside hooks]

Where somebody's hooks lie inside ours (recomputation, offloading), tensors are theirs, and ReLU is left as torch makes
it: a repeated forward must save what the first one did. What a recomputed layer keeps, its input, is ours again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from echelon import compat
from echelon.kernels.activations import bitmask, max_pool
from echelon.kernels.activations.blockwise_cast import FORMATS, BlockFormat
from echelon.kernels.activations.pool_indices import PoolWindow, encode
from echelon.kernels.tensor_spec import TensorSpec, is_dense, is_dense_by_sample
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.saved_tensor_formats import (
    BitmaskTensor,
    PoolIndexTensor,
    QuantizedTensor,
    ReluOutputTensor,
    SavedTensorFormat,
    SpecOnlyTensor,
    StoredView,
    UncompressedTensor,
    total_bytes,
)

MIN_SAMPLE_NUMEL = 64
"""elements of a sample (of dim 0) that are worth the trouble: of a sample, so that every batch is treated alike"""

Function = Callable[..., Any]
RELUS: dict[Function, bool] = {
    F.relu: False,
    torch.relu: False,
    Tensor.relu: False,
    torch.relu_: True,
    Tensor.relu_: True,
}
"""whether it changes its input in place, unless it is told"""
MAX_POOLS: tuple[Function, ...] = (F.max_pool2d, torch.max_pool2d)
AVG_POOLS: tuple[Function, ...] = (F.avg_pool2d, F.adaptive_avg_pool2d)
LOG_SOFTMAXES: tuple[Function, ...] = (
    *(F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(torch.logsumexp, Tensor.logsumexp),
)
VIEW_NODES = {
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy")
}
"""what gives a parameter another shape or type"""


def check_compatible(compress: str, recompute: str, offload: str) -> None:
    if fault := compression_cost.incompatibility(compress, recompute, offload):
        raise ValueError(f"compress={compress} {fault}")


@contextmanager
def compressed(compress: str = "lossless", *, least: int = MIN_SAMPLE_NUMEL) -> Iterator[SavedTensorCompression]:
    """Around forward: what it leaves for backward is compressed. Tensors with fewer than `least` elements for each
    index of their first dimension are not.

    >>> x = torch.ones(8, 512, requires_grad=True)
    >>> with ec.compressed("lossless"):
    ...     loss = torch.relu(x).sum()
    >>> loss.backward()
    """
    saving = SavedTensorCompression(compression_cost.check_compression(compress), least)
    with saved_tensors_hooks(*saving.hooks), saving:
        yield saving
        saving.compress_pending()


@dataclass(frozen=True)
class _ReluBits:
    """Of a tensor that our ReLU made, as long as it is not changed."""

    bits: Tensor
    counts: Tensor
    version: int


@dataclass(frozen=True)
class _PoolingCall:
    """The call under way."""

    input: Tensor
    window: PoolWindow | None
    """of a maximum"""


class SavedTensorCompression(TorchFunctionMode):
    """What is saved while it is entered, and in which form."""

    def __init__(self, compress: str, least: int):
        super().__init__()
        self.lossless = compress != compression_cost.NONE
        self.block_format = FORMATS.get(compression_cost.value_format(compress))
        self.min_numel = max(least, 1)
        self.hooks = (self._pack, _unpack)
        self._pooling: _PoolingCall | None = None
        self._exact = False
        """inside a call that saves logarithms"""
        self._pending: deque[ReluOutputTensor] = deque()
        """for the number of their values that are not zero"""
        self._saved: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """What is kept now of all that was saved: parameters left out, every storage once."""
        return total_bytes(iter(self._saved))

    # -- torch's functions --------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Function, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not self.lossless or func not in WATCHED or not torch.is_grad_enabled():
            return func(*args, **named)
        if func in LOG_SOFTMAXES:
            self._exact = True
            try:
                return func(*args, **named)
            finally:
                self._exact = False
        x: Any = args[0] if args else named.get("input")
        if not self._supports(x) or compat.top_saved_tensor_hooks() != self.hooks:  # [Note: hooks inside hooks]
            return func(*args, **named)
        if func in RELUS:
            in_place = bool(_argument(args, named, 1, "inplace", RELUS[func]))
            # Autograd allows functions of several outputs to change a tensor in place, but not a view of one.
            return func(*args, **named) if in_place and x._base is not None else self._relu(x, in_place)
        window = _pool_window(x, args, named) if func in MAX_POOLS else None
        if func in MAX_POOLS and window is None:
            return func(*args, **named)
        if window is not None and max_pool.supports(x, window):
            return max_pool.max_pool(x, window)
        self._pooling = _PoolingCall(x, window)
        try:
            return func(*args, **named)
        finally:
            self._pooling = None

    def _supports(self, x: Any) -> bool:
        """Large enough, and lying as our kernels read it."""
        usual = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.device.type in ("cpu", "cuda")
        return bool(usual and x.requires_grad and x.is_floating_point() and self._is_large(x) and is_dense_by_sample(x))

    def _is_large(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.numel() >= self.min_numel * x.shape[0] > 0

    def _relu(self, x: Tensor, in_place: bool) -> Tensor:
        found, which, counts = bitmask.relu_with_bitmask(x, in_place=in_place)
        noted: Any = found
        noted.relu_bits = _ReluBits(which, counts, found._version)
        self.compress_pending(compression_cost.MAX_PENDING_RELUS - 1)  # now that the device has this to do
        return found

    def compress_pending(self, keep: int = 0) -> None:
        """What waits is made smaller, the oldest first, until so many are left."""
        while len(self._pending) > keep:
            self._pending.popleft().compress()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> SavedTensorFormat:
        stored = self._compress(x)
        self._saved.add(stored)
        return stored

    def _compress(self, x: Tensor) -> SavedTensorFormat:
        parameter = _is_parameter(x)
        usual = type(x) is Tensor and x.layout is torch.strided and x.device.type in ("cpu", "cuda")
        if parameter or not self.lossless or self._exact or not usual or not self._is_large(x):
            return _uncompressed(x, parameter)
        if (pooled := self._compress_pooling(x)) is not None:
            return pooled
        if x.dtype == torch.bool:
            return self._reuse_stored(x, BitmaskTensor.from_tensor) if is_dense_by_sample(x) else _uncompressed(x)
        if x.is_floating_point() and x.requires_grad:
            return self._compress_values(x)
        return _uncompressed(x)

    def _compress_pooling(self, x: Tensor) -> SavedTensorFormat | None:
        pooling = self._pooling
        if pooling is None:
            return None
        if pooling.window is not None and x.dtype == torch.int64:
            return PoolIndexTensor(encode(x, pooling.window), pooling.window)
        same = x.dtype == pooling.input.dtype and x.data_ptr() == pooling.input.data_ptr()
        return SpecOnlyTensor(TensorSpec.from_tensor(x)) if same and x.numel() == pooling.input.numel() else None

    def _compress_values(self, x: Tensor) -> SavedTensorFormat:
        base = x._base
        if (
            base is not None
            and base.numel() == x.numel()
            and type(base) is Tensor
            and is_dense_by_sample(base)
            and is_dense(x)
        ):
            whole = self._reuse_stored(base, self._compress_dense)
            if not isinstance(whole, UncompressedTensor):
                return StoredView(whole, tuple(x.shape), x.stride())
        if is_dense_by_sample(x):
            return self._reuse_stored(x, self._compress_dense)
        # A part of something: it lies with gaps. What is spread out (a stride of 0) is smaller as it is.
        kind = self._format_for(x)
        if kind is None or 0 in x.stride():
            return _uncompressed(x)
        return self._reuse_stored(x, lambda part: QuantizedTensor.from_tensor(part.contiguous(), kind))

    def _compress_dense(self, x: Tensor) -> SavedTensorFormat:
        known: _ReluBits | None = getattr(x, "relu_bits", None)
        kind = self._format_for(x)
        small = x.is_cuda and x.nbytes < compression_cost.MIN_SPARSE_BYTES
        if known is not None and known.version == x._version and not small:
            self.compress_pending(compression_cost.MAX_PENDING_RELUS - 1)
            found = ReluOutputTensor.from_output(_uncompressed(x), known.bits, known.counts, kind)
            self._pending.append(found)
            return found
        return QuantizedTensor.from_tensor(x, kind) if kind is not None else _uncompressed(x)

    def _format_for(self, x: Tensor) -> BlockFormat | None:
        """Of fewer bits than it has."""
        return (
            self.block_format
            if self.block_format is not None and x.element_size() > self.block_format.dtype.itemsize
            else None
        )

    def _reuse_stored(self, x: Tensor, make: Callable[[Tensor], SavedTensorFormat]) -> SavedTensorFormat:
        """What is stored already of this tensor as it is now, else what is made."""
        noted: Any = x
        found, version, by = getattr(x, "stored", (lambda: None, -1, None))
        stored: SavedTensorFormat | None = found() if version == x._version and by is self.hooks else None
        if stored is None:
            stored = make(x)
            if not isinstance(stored, UncompressedTensor):  # which would keep itself alive
                noted.weight_source = (weakref.ref(stored), x._version, self.hooks)
        return stored


WATCHED = {*RELUS, *MAX_POOLS, *AVG_POOLS, *LOG_SOFTMAXES}


def _unpack(stored: SavedTensorFormat) -> Tensor:
    return stored.restore()


def _uncompressed(x: Tensor, parameter: bool = False) -> UncompressedTensor:
    # A parameter's storage may change between forward and backward, so the parameter itself is kept. Something that
    # was computed is kept without its history: its maker, which may be what saves it, would keep itself alive.
    return UncompressedTensor(x if x.is_leaf else x.detach(), x._version, is_counted=not parameter)


def _is_parameter(x: Tensor) -> bool:
    """It is a parameter, in any shape or type."""
    if type(x) is nn.Parameter or type(x._base) is nn.Parameter:
        return True
    node: Any = x.grad_fn
    while node is not None and node.name() in VIEW_NODES:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _argument(args: Any, named: Any, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else named.get(name, default)


def _pair(value: Any) -> tuple[int, int]:
    both = tuple(value) if isinstance(value, list | tuple) else (value,)
    return int(both[0]), int(both[-1])


def _pool_window(x: Tensor, args: Any, named: Any) -> PoolWindow | None:
    """Of a call of max pooling; none where the user asks for the indices, or a byte does not hold a place."""
    kernel = _pair(_argument(args, named, 1, "kernel_size", 0))
    stride = _argument(args, named, 2, "stride", None)
    padding, dilation = _argument(args, named, 3, "padding", 0), _argument(args, named, 4, "dilation", 1)
    if _argument(args, named, 6, "return_indices", False) or not 0 < kernel[0] * kernel[1] <= 256:
        return None
    return PoolWindow(
        width=x.shape[-1],
        kernel=kernel,
        stride=_pair(stride) if stride not in (None, [], ()) else kernel,
        padding=_pair(padding),
        dilation=_pair(dilation),
        ceil_mode=bool(_argument(args, named, 5, "ceil_mode", False)),
    )
