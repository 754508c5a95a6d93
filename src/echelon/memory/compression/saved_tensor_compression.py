"""Compression of saved activations in the manner of Gist (Jain et al., ISCA 2018), for any model.

[Note: who reads a saved tensor]

Saved-tensor hooks see every tensor that autograd saves, but not for which operator. Two things add that:

    a torch function mode sees each call of ReLU and of a pooling, whatever module makes it
    an output of our ReLU carries its bitmask, so whoever saves it later is known to save a ReLU output

1. ReLU's backward needs which elements are above zero: a bit each, written by its forward (activations/bitmask.py).
2. Poolings save their input, of which backward only needs the shape; max pooling saves 8-byte indices, of which one
   byte, the position inside the window, says as much.
3. Other operators that save a ReLU output (a convolution, a linear layer) need its values: the nonzeros, packed, with
   the bits of 1 for their positions.
4. Boolean masks are saved as bits.
5. Other values are saved as they are, or with delayed precision reduction in fewer bits: forward computes with all
   bits, only backward reads rounded ones. Values of 3 are rounded likewise.

1 to 4 are exact. Parameters, tensors without gradient (inputs, tables), small tensors and log probabilities are not
compressed: backward exponentiates the latter, so rounding them by a few hundredths would change every gradient by as
much. A tensor that is saved several times is stored once.

[Note: hooks inside hooks]

Where other saved-tensor hooks are inside ours (checkpointing, offload), tensors are theirs, and ReLU is torch's: a
rerun must save what the first forward did. The input that a checkpointed layer saves is ours again.
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
from echelon.kernels.activations import bitmask, max_pool, sparse_values
from echelon.kernels.activations.blockwise_cast import FORMATS, BlockFormat
from echelon.kernels.activations.max_pool import PoolWindow, encode
from echelon.kernels.tensor_spec import TensorSpec, as_rows, is_dense, is_dense_by_sample
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression import saved_tensor_formats as formats
from echelon.memory.compression.saved_tensor_formats import SavedTensorFormat, UncompressedTensor

MIN_SAMPLE_NUMEL = 64
"""minimum elements of a sample (dim 0): per sample, so that all batches are treated alike"""

Function = Callable[..., Any]
RELUS: dict[Function, bool] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), False),
    **dict.fromkeys((torch.relu_, Tensor.relu_), True),
}
"""whether it is in place, unless the call says so"""
MAX_POOLS: tuple[Function, ...] = (F.max_pool2d, torch.max_pool2d)
AVG_POOLS: tuple[Function, ...] = (F.avg_pool2d, F.adaptive_avg_pool2d)
LOG_SOFTMAXES: tuple[Function, ...] = (
    *(F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(torch.logsumexp, Tensor.logsumexp),
)
VIEW_NODES = {
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy")
}
"""autograd nodes that change a parameter's shape or dtype only"""


def check_compatible(compress: str, recompute: str, offload: str) -> None:
    if fault := compression_cost.incompatibility(compress, recompute, offload):
        raise ValueError(f"compress={compress} {fault}")


@contextmanager
def compressed(compress: str = "lossless", *, least: int = MIN_SAMPLE_NUMEL) -> Iterator[SavedTensorCompression]:
    """Compress what a forward inside this context saves for backward.

    Tensors with fewer than `least` elements per index of their first dim are not compressed.

    >>> x = torch.ones(8, 512, requires_grad=True)
    >>> with ec.compressed("lossless"):
    ...     loss = torch.relu(x).sum()
    >>> loss.backward()
    """
    compression = SavedTensorCompression(compression_cost.check_compression(compress), least)
    with saved_tensors_hooks(*compression.hooks), compression:
        yield compression
        compression.compress_pending()


@dataclass(frozen=True)
class _ReluBits:
    """Bitmask of an output of our ReLU, valid until it is modified."""

    bits: Tensor
    counts: Tensor
    version: int


@dataclass(frozen=True)
class _PoolingCall:
    """The pooling call in progress."""

    input: Tensor
    window: PoolWindow | None
    """of max pooling"""


class SavedTensorCompression(TorchFunctionMode):
    """Compresses what autograd saves while this mode is entered."""

    def __init__(self, compress: str, least: int):
        super().__init__()
        self.lossless = compress != compression_cost.NONE
        self.block_format = FORMATS.get(compression_cost.value_format(compress))
        self.min_numel = max(least, 1)
        self.hooks = (self._pack, _unpack)
        self._pooling: _PoolingCall | None = None
        self._exact = False
        """inside a call that saves log probabilities"""
        self._pending: deque[formats.ReluOutputTensor] = deque()
        """ReLU outputs that wait for their count of nonzeros"""
        self._saved: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes that are stored now of all saved tensors: without parameters, every storage once."""
        return formats.total_bytes(iter(self._saved))

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
            # Autograd lets functions with several outputs modify a tensor in place, but not a view.
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
        """Return whether x is large enough, and in a memory layout that the kernels support."""
        is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.device.type in ("cpu", "cuda")
        is_activation = is_plain and x.requires_grad and x.is_floating_point()
        return bool(is_activation and self._is_large(x) and is_dense_by_sample(x))

    def _is_large(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.numel() >= self.min_numel * x.shape[0] > 0

    def _relu(self, x: Tensor, in_place: bool) -> Tensor:
        output, bits, counts = bitmask.relu_with_bitmask(x, in_place=in_place)
        holder: Any = output
        holder.relu_bits = _ReluBits(bits, counts, output._version)
        self.compress_pending(compression_cost.MAX_PENDING_RELUS - 1)  # the device has work queued now
        return output

    def compress_pending(self, keep: int = 0) -> None:
        """Compress pending ReLU outputs, the oldest first, until `keep` are left."""
        while len(self._pending) > keep:
            self._pending.popleft().compress()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> SavedTensorFormat:
        stored = self._compress(x)
        self._saved.add(stored)
        return stored

    def _compress(self, x: Tensor) -> SavedTensorFormat:
        parameter = _is_parameter(x)
        is_plain = type(x) is Tensor and x.layout is torch.strided and x.device.type in ("cpu", "cuda")
        if parameter or not self.lossless or self._exact or not is_plain or not self._is_large(x):
            return _uncompressed(x, parameter)
        if (pooled := self._compress_pooling(x)) is not None:
            return pooled
        if x.dtype == torch.bool and is_dense_by_sample(x):
            return self._reuse_stored(x, formats.BitmaskTensor.from_tensor)
        if x.is_floating_point() and x.requires_grad:
            return self._compress_values(x)
        return _uncompressed(x)

    def _compress_pooling(self, x: Tensor) -> SavedTensorFormat | None:
        pooling = self._pooling
        if pooling is None:
            return None
        if pooling.window is not None and x.dtype == torch.int64:
            return formats.PoolIndexTensor(encode(x, pooling.window), pooling.window)
        expected = pooling.input
        same = x.dtype == expected.dtype and x.data_ptr() == expected.data_ptr() and x.numel() == expected.numel()
        return formats.SpecOnlyTensor(TensorSpec.from_tensor(x)) if same else None

    def _compress_values(self, x: Tensor) -> SavedTensorFormat:
        base = x._base
        if (
            base is not None
            and base.numel() == x.numel()
            and type(base) is Tensor
            and is_dense_by_sample(base)
            and is_dense(x)
        ):
            stored_base = self._reuse_stored(base, self._compress_dense)
            if not isinstance(stored_base, UncompressedTensor):
                return formats.StoredView(stored_base, tuple(x.shape), x.stride())
        if is_dense_by_sample(x):
            return self._reuse_stored(x, self._compress_dense)
        # A view with gaps. An expanded view (stride 0) is smaller as it is.
        block_format = self._format_for(x)
        if block_format is None or 0 in x.stride():
            return _uncompressed(x)
        return self._reuse_stored(x, lambda part: formats.QuantizedTensor.from_tensor(part.contiguous(), block_format))

    def _compress_dense(self, x: Tensor) -> SavedTensorFormat:
        relu_bits: _ReluBits | None = getattr(x, "relu_bits", None)
        block_format = self._format_for(x)
        is_small = x.is_cuda and x.nbytes < compression_cost.MIN_SPARSE_BYTES
        if relu_bits is not None and relu_bits.version == x._version and not is_small:
            self.compress_pending(compression_cost.MAX_PENDING_RELUS - 1)
            output = _uncompressed(x)
            count = sparse_values.count_nonzero(relu_bits.bits, relu_bits.counts, as_rows(output.tensor).shape[1])
            self._pending.append(formats.ReluOutputTensor(output, relu_bits.bits, count, block_format))
            return self._pending[-1]
        return formats.QuantizedTensor.from_tensor(x, block_format) if block_format is not None else _uncompressed(x)

    def _format_for(self, x: Tensor) -> BlockFormat | None:
        """Return the low-precision format for x, if it is shorter than its dtype."""
        block_format = self.block_format
        is_shorter = block_format is not None and block_format.dtype.itemsize < x.element_size()
        return block_format if is_shorter else None

    def _reuse_stored(self, x: Tensor, make: Callable[[Tensor], SavedTensorFormat]) -> SavedTensorFormat:
        """Return what is stored already of this version of x, else `make(x)`."""
        holder: Any = x
        reference, version, hooks = getattr(x, "stored", (lambda: None, -1, None))
        stored: SavedTensorFormat | None = reference() if version == x._version and hooks is self.hooks else None
        if stored is None:
            stored = make(x)
            if not isinstance(stored, UncompressedTensor):  # it would keep itself alive
                holder.stored = (weakref.ref(stored), x._version, self.hooks)
        return stored


WATCHED = {*RELUS, *MAX_POOLS, *AVG_POOLS, *LOG_SOFTMAXES}


def _unpack(stored: SavedTensorFormat) -> Tensor:
    return stored.restore()


def _uncompressed(x: Tensor, parameter: bool = False) -> UncompressedTensor:
    # A parameter's storage may change between forward and backward, so hold the parameter itself. Detach other tensors:
    # their grad_fn, which may be what saves them, would keep itself alive.
    return UncompressedTensor(x if x.is_leaf else x.detach(), x._version, is_counted=not parameter)


def _is_parameter(x: Tensor) -> bool:
    """Return whether x is a parameter, in any shape or dtype."""
    if type(x) is nn.Parameter or type(x._base) is nn.Parameter:
        return True
    node: Any = x.grad_fn
    while node is not None and node.name() in VIEW_NODES:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _argument(args: Any, named: Any, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else named.get(name, default)


def _pair(value: Any) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return int(values[0]), int(values[-1])


def _pool_window(x: Tensor, args: Any, named: Any) -> PoolWindow | None:
    """Return the windows of a max-pool call; None if it returns indices, or a byte cannot hold a position."""
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
