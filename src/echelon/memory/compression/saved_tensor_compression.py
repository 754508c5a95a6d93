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
from echelon.kernels.activations.blockwise_cast import KINDS, Kind
from echelon.kernels.activations.pool_indices import Window, encode
from echelon.kernels.tensor_spec import Lying, dense, in_rows
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.saved_tensor_formats import (
    Flags,
    Kept,
    Narrow,
    Places,
    Rectified,
    Shape,
    Stored,
    View,
    total_bytes,
)

LEAST = 64
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
MAXIMA: tuple[Function, ...] = (F.max_pool2d, torch.max_pool2d)
MEANS: tuple[Function, ...] = (F.avg_pool2d, F.adaptive_avg_pool2d)
LOGARITHMS: tuple[Function, ...] = (
    *(F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(torch.logsumexp, Tensor.logsumexp),
)
ALIKE = {f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy")}
"""what gives a parameter another shape or type"""


def check(compress: str, recompute: str, offload: str) -> None:
    if fault := compression_cost.beside(compress, recompute, offload):
        raise ValueError(f"compress={compress} {fault}")


@contextmanager
def compressed(compress: str = "lossless", *, least: int = LEAST) -> Iterator[Saving]:
    """Around forward: what it leaves for backward is compressed. Tensors with fewer than `least` elements for each
    index of their first dimension are not.
    """
    saving = Saving(compression_cost.check(compress), least)
    with saved_tensors_hooks(*saving.hooks), saving:
        yield saving
        saving.settle()


@dataclass(frozen=True)
class _Known:
    """Of a tensor that our ReLU made, as long as it is not changed."""

    bits: Tensor
    counts: Tensor
    version: int


@dataclass(frozen=True)
class _Pooling:
    """The call under way."""

    input: Tensor
    window: Window | None
    """of a maximum"""


class Saving(TorchFunctionMode):
    """What is saved while it is entered, and in which form."""

    def __init__(self, compress: str, least: int):
        super().__init__()
        self.lossless = compress != compression_cost.NONE
        self.kind = KINDS.get(compression_cost.narrow_of(compress))
        self.least = max(least, 1)
        self.hooks = (self._pack, _unpack)
        self._pooling: _Pooling | None = None
        self._exact = False
        """inside a call that saves logarithms"""
        self._waiting: deque[Rectified] = deque()
        """for the number of their values that are not zero"""
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """What is kept now of all that was saved: parameters left out, every storage once."""
        return total_bytes(iter(self._all))

    # -- torch's functions --------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Function, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not self.lossless or func not in WATCHED or not torch.is_grad_enabled():
            return func(*args, **named)
        if func in LOGARITHMS:
            self._exact = True
            try:
                return func(*args, **named)
            finally:
                self._exact = False
        x: Any = args[0] if args else named.get("input")
        if not self._takes(x) or compat.innermost_saving_hooks() != self.hooks:  # [Note: hooks inside hooks]
            return func(*args, **named)
        if func in RELUS:
            in_place = bool(_argument(args, named, 1, "inplace", RELUS[func]))
            # Autograd allows functions of several outputs to change a tensor in place, but not a view of one.
            return func(*args, **named) if in_place and x._base is not None else self._relu(x, in_place)
        window = _window(x, args, named) if func in MAXIMA else None
        if func in MAXIMA and window is None:
            return func(*args, **named)
        if window is not None and max_pool.takes(x, window):
            return max_pool.maximum(x, window)
        self._pooling = _Pooling(x, window)
        try:
            return func(*args, **named)
        finally:
            self._pooling = None

    def _takes(self, x: Any) -> bool:
        """Large enough, and lying as our kernels read it."""
        usual = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.device.type in ("cpu", "cuda")
        return bool(usual and x.requires_grad and x.is_floating_point() and self._large(x) and in_rows(x))

    def _large(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.numel() >= self.least * x.shape[0] > 0

    def _relu(self, x: Tensor, in_place: bool) -> Tensor:
        found, which, counts = bitmask.relu(x, in_place=in_place)
        noted: Any = found
        noted.rectified = _Known(which, counts, found._version)
        self.settle(compression_cost.AHEAD - 1)  # now that the device has this to do
        return found

    def settle(self, left: int = 0) -> None:
        """What waits is made smaller, the oldest first, until so many are left."""
        while len(self._waiting) > left:
            self._waiting.popleft().settle()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> Stored:
        stored = self._stored(x)
        self._all.add(stored)
        return stored

    def _stored(self, x: Tensor) -> Stored:
        parameter = _of_a_parameter(x)
        usual = type(x) is Tensor and x.layout is torch.strided and x.device.type in ("cpu", "cuda")
        if parameter or not self.lossless or self._exact or not usual or not self._large(x):
            return _kept(x, parameter)
        if (pooled := self._of_pooling(x)) is not None:
            return pooled
        if x.dtype == torch.bool:
            return self._once(x, Flags.of) if in_rows(x) else _kept(x)
        if x.is_floating_point() and x.requires_grad:
            return self._values(x)
        return _kept(x)

    def _of_pooling(self, x: Tensor) -> Stored | None:
        pooling = self._pooling
        if pooling is None:
            return None
        if pooling.window is not None and x.dtype == torch.int64:
            return Places(encode(x, pooling.window), pooling.window)
        same = x.dtype == pooling.input.dtype and x.data_ptr() == pooling.input.data_ptr()
        return Shape(Lying.of(x)) if same and x.numel() == pooling.input.numel() else None

    def _values(self, x: Tensor) -> Stored:
        base = x._base
        if base is not None and base.numel() == x.numel() and type(base) is Tensor and in_rows(base) and dense(x):
            whole = self._once(base, self._compact)
            if not isinstance(whole, Kept):
                return View(whole, tuple(x.shape), x.stride())
        if in_rows(x):
            return self._once(x, self._compact)
        # A part of something: it lies with gaps. What is spread out (a stride of 0) is smaller as it is.
        kind = self._kind(x)
        if kind is None or 0 in x.stride():
            return _kept(x)
        return self._once(x, lambda part: Narrow.of(part.contiguous(), kind))

    def _compact(self, x: Tensor) -> Stored:
        known: _Known | None = getattr(x, "rectified", None)
        kind = self._kind(x)
        small = x.is_cuda and x.nbytes < compression_cost.SMALL
        if known is not None and known.version == x._version and not small:
            self.settle(compression_cost.AHEAD - 1)
            found = Rectified.of(_kept(x), known.bits, known.counts, kind)
            self._waiting.append(found)
            return found
        return Narrow.of(x, kind) if kind is not None else _kept(x)

    def _kind(self, x: Tensor) -> Kind | None:
        """Of fewer bits than it has."""
        return self.kind if self.kind is not None and x.element_size() > self.kind.dtype.itemsize else None

    def _once(self, x: Tensor, make: Callable[[Tensor], Stored]) -> Stored:
        """What is stored already of this tensor as it is now, else what is made."""
        noted: Any = x
        found, version, by = getattr(x, "stored", (lambda: None, -1, None))
        stored: Stored | None = found() if version == x._version and by is self.hooks else None
        if stored is None:
            stored = make(x)
            if not isinstance(stored, Kept):  # which would keep itself alive
                noted.stored = (weakref.ref(stored), x._version, self.hooks)
        return stored


WATCHED = {*RELUS, *MAXIMA, *MEANS, *LOGARITHMS}


def _unpack(stored: Stored) -> Tensor:
    return stored.restore()


def _kept(x: Tensor, parameter: bool = False) -> Kept:
    # A parameter's storage may change between forward and backward, so the parameter itself is kept. Something that
    # was computed is kept without its history: its maker, which may be what saves it, would keep itself alive.
    return Kept(x if x.is_leaf else x.detach(), x._version, counts=not parameter)


def _of_a_parameter(x: Tensor) -> bool:
    """It is a parameter, in any shape or type."""
    if type(x) is nn.Parameter or type(x._base) is nn.Parameter:
        return True
    node: Any = x.grad_fn
    while node is not None and node.name() in ALIKE:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _argument(args: Any, named: Any, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else named.get(name, default)


def _pair(value: Any) -> tuple[int, int]:
    both = tuple(value) if isinstance(value, list | tuple) else (value,)
    return int(both[0]), int(both[-1])


def _window(x: Tensor, args: Any, named: Any) -> Window | None:
    """Of a call of max pooling; none where the user asks for the indices, or a byte does not hold a place."""
    kernel = _pair(_argument(args, named, 1, "kernel_size", 0))
    stride = _argument(args, named, 2, "stride", None)
    padding, dilation = _argument(args, named, 3, "padding", 0), _argument(args, named, 4, "dilation", 1)
    if _argument(args, named, 6, "return_indices", False) or not 0 < kernel[0] * kernel[1] <= 256:
        return None
    return Window(
        width=x.shape[-1],
        kernel=kernel,
        stride=_pair(stride) if stride not in (None, [], ()) else kernel,
        padding=_pair(padding),
        dilation=_pair(dilation),
        ceil=bool(_argument(args, named, 5, "ceil_mode", False)),
    )
