"""Counter-based random numbers: each number is a function of a key and an index, in plain torch operations.

[Note: counters instead of states]
A stateful generator returns number i after numbers 0 .. i-1: what a rank draws depends on what it drew before. Here

    number = mix(index ^ key(seed, name))

without any state. A rank that holds rows 100 to 199 of a matrix computes only those numbers, bit-equal to the same rows
of the full matrix on one device. Recomputation and resuming draw the same numbers again.

    initial weights:  key(seed, parameter name), index = flat index in the full parameter
    dropout, draws:   key(seed, call site) -> one key per sample, index = flat index in the full sample

The global sample index grows from step to step, so it also stands for the step.

`mix` is the output function of splitmix64 applied to `(index ^ key) * GOLDEN`. The form with xor is exact under
`torch.compile`; `index * GOLDEN + key` is not.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHUNK = 1 << 15
"""Numbers computed at a time: temporaries of 256 KiB fit a CPU's cache."""

CHUNK_CUDA = 1 << 24
"""The same on an accelerator, where a launch costs more than a temporary of 128 MiB."""

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)

MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number that each dtype represents exactly, so that rounding never gives 1."""

Window = Mapping[int, tuple[int, int]]
"""This rank's slice of a full tensor: {dim: (offset, size of the full dim)}; other dims are not sharded."""


def key(seed: int, name: str) -> int:
    """The key of a named stream of numbers: 63 bits of a hash of both."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits (int64) for each index. A tensor of keys gives one row per key: shape [keys, *index.shape]."""
    return _map_chunks(_mix, key, index, torch.int64)


def uniform(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), never 1."""
    digits = MANTISSA_BITS[dtype]

    def draw(x: Tensor) -> Tensor:
        return _shift(_mix(x), 64 - digits).to(dtype) * 2.0**-digits

    return _map_chunks(draw, key, index, dtype)


def normal(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by Box and Muller's method, at most 6.7 away from 0.

    They are computed in fp64 and rounded to fp32 for every dtype. A last-bit difference between two implementations of
    `log` (vector, scalar, compiled, another device) then almost never shows, and an fp64 model starts from the fp32
    model's weights.
    """

    def draw(x: Tensor) -> Tensor:
        z = _mix(x)
        # The high half gives the radius and lies in (0, 1], so that log is finite; the low half gives the angle.
        radius = ((_shift(z, 32).double() + 1) * 2.0**-32).log().mul(-2).sqrt()
        angle = (z & 0xFFFFFFFF).double() * (2 * math.pi * 2.0**-32)
        return (radius * angle.cos()).float().to(dtype)

    return _map_chunks(draw, key, index, dtype)


def truncated_normal(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers truncated to [-2, 2], by the inverse of the distribution.

    Computed in fp64 and rounded to fp32, as `normal` is.
    """
    outside = 0.5 * math.erfc(math.sqrt(2))
    inside = outside + uniform(key, index, torch.float64) * (1 - 2 * outside)
    out: Tensor = torch.special.ndtri(inside)
    return out.float().to(dtype)


SAMPLERS = {"normal": normal, "truncated": truncated_normal}


def keep_mask(key: int | Tensor, index: Tensor, p: float) -> Tensor:
    """True with probability 1 - p."""
    if p >= 1:
        return _map_chunks(torch.zeros_like, key, index, torch.bool)
    threshold = int(p * 2.0**64) - (1 << 63)
    return _map_chunks(lambda x: _mix(x) >= threshold, key, index, torch.bool)


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    z = x * GOLDEN
    z = (z ^ _shift(z, 30)) * MIX_1
    z = (z ^ _shift(z, 27)) * MIX_2
    return z ^ _shift(z, 31)


def _map_chunks(draw: Callable[[Tensor], Tensor], key: int | Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """`draw(index ^ key)`, in chunks that bound the memory of the temporaries."""
    columns = index.reshape(1, -1)
    rows = key.reshape(-1, 1) if isinstance(key, Tensor) else None
    shape = index.shape if rows is None else (len(rows), *index.shape)
    size = (1 if rows is None else len(rows), columns.shape[1])
    # A compiler fuses all operations, so there are no temporaries to bound.
    if size[0] * size[1] <= _chunk_size(index.device) or torch.compiler.is_compiling():
        return draw(columns ^ (key if rows is None else rows)).to(dtype).view(shape)
    out = torch.empty(size, dtype=dtype, device=index.device)
    width = min(size[1], _chunk_size(index.device))
    height = max(1, _chunk_size(index.device) // width)
    for top in range(0, size[0], height):
        for left in range(0, size[1], width):
            part = key if rows is None else rows[top : top + height]
            out[top : top + height, left : left + width] = draw(columns[:, left : left + width] ^ part)
    return out.view(shape)


def _chunk_size(device: torch.device) -> int:
    return CHUNK if device.type == "cpu" else CHUNK_CUDA


def logical_index(
    sizes: Sequence[int], window: Window, first: int, last: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Flat indices in the full tensor of elements first .. last - 1 of this rank's slice (local `sizes`).

    The indices of padding beyond the end of the full tensor are meaningless.
    """
    local = torch.arange(first, last, device=device)
    # Only the dims up to the innermost sharded one need index arithmetic; the rest is contiguous.
    cut = max([0, *(dim for dim, (_, full_size) in window.items() if full_size != sizes[dim])])
    inner = math.prod(sizes[cut + 1 :])
    if cut == 0:
        return local + (window[0][0] * inner if 0 in window else 0)
    index, rest, stride = local % inner, local // inner, inner
    for dim in range(cut, -1, -1):
        offset, full_size = window.get(dim, (0, sizes[dim]))
        index += (rest % sizes[dim] + offset) * stride
        rest //= sizes[dim]
        stride *= full_size
    return index


PartialDims = dict[int, tuple[int | Tensor, int]]
"""Like a window, or with the index of each element in the full dim, where they are not contiguous"""


def partial_index(sizes: Sequence[int], parts: PartialDims, device: torch.device | str = "cpu") -> Tensor:
    """Flat indices in the full tensor of all elements of this rank's part (local `sizes`)."""
    index, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in range(len(sizes) - 1, -1, -1):
        where, full_size = parts.get(dim, (0, sizes[dim]))
        indices = where.to(device) if isinstance(where, Tensor) else where + torch.arange(sizes[dim], device=device)
        index = (indices * stride).view(-1, *[1] * index.dim()) + index
        stride *= full_size
    return index.view(-1)


@dataclass(frozen=True, kw_only=True)
class Init:
    """How a parameter is initialised."""

    distribution: str
    """normal, truncated (a normal within two standard deviations), zeros or ones."""

    std: float = 1.0
    """The standard deviation of a normal, before it is truncated."""

    def values(self, seed: int, name: str, index: Tensor, dtype: torch.dtype) -> Tensor:
        """The initial values of the elements with these flat indices in the full parameter."""
        if self.distribution in SAMPLERS:
            return (SAMPLERS[self.distribution](key(seed, name), index) * self.std).to(dtype)
        return torch.full(index.shape, 1.0 if self.distribution == "ones" else 0.0, dtype=dtype, device=index.device)

    @torch.no_grad()
    def fill(self, out: Tensor, seed: int, name: str, window: Window | None = None) -> None:
        """Write the initial values of a parameter, or of the slice of it that `window` describes, into `out`."""
        if self.distribution in ("zeros", "ones"):
            out.fill_(1.0 if self.distribution == "ones" else 0.0)
            return
        for first, last, rows in _row_chunks(out):
            index = logical_index(out.shape, window or {}, first, last, out.device)
            rows.copy_(self.values(seed, name, index, out.dtype).view_as(rows))


def _row_chunks(out: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(first, last, view) of blocks of rows with at most a chunk of elements, or one row where a row is longer."""
    if out.dim() == 0:
        yield 0, 1, out
        return
    row = out[0].numel() if len(out) else 1
    height = max(1, _chunk_size(out.device) // max(row, 1))
    for top in range(0, len(out), height):
        rows = out[top : top + height]
        yield top * row, top * row + rows.numel(), rows


def normal_init(std: float) -> Init:
    return Init(distribution="normal", std=std)


def truncated_normal_init(std: float) -> Init:
    return Init(distribution="truncated", std=std)


ZEROS = Init(distribution="zeros")
ONES = Init(distribution="ones")


class RandomStream:
    """The seed and sample indices that all random sites of a model share.

    The training loop sets `samples` before each microbatch, and again before a backward pass that recomputes it if
    another microbatch ran in between. It is a plain object, not thread-local, because recomputation on CUDA runs in
    autograd's thread.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.samples: Tensor | None = None
        """int64 [rows]: the global sample index of each row of the microbatch."""


class RandomSite(nn.Module):
    """A module whose random numbers are functions of (seed, site, global sample index, index in the sample).

    Dim 0 of its tensors is the sample. A module that is called twice in one forward pass draws the same numbers twice
    (a counter of calls would be wrong under recomputation); use two modules.
    """

    def __init__(self, site: str, stream: RandomStream | None) -> None:
        super().__init__()
        self.window: PartialDims = {}
        """This rank's part of each sharded dim of the input, never of dim 0."""
        self.rows: slice | Tensor = slice(None)
        """This rank's rows of the microbatch."""
        self.bind(site, stream)

    def bind(self, site: str, stream: RandomStream | None) -> None:
        """Set the site and its stream; without a stream it uses torch's generator."""
        self.site = site
        self.stream = stream
        self._seed = stream.seed if stream else 0
        self._key = key(self._seed, site)
        self._key_tensor = torch.tensor(self._key, device="cpu")

    def keys_and_index(self, shape: Sequence[int], window: PartialDims, device: torch.device) -> tuple[Tensor, Tensor]:
        """The key of each row, and the index of each element in the full sample."""
        assert self.stream is not None
        if self._seed != self.stream.seed:
            self.bind(self.site, self.stream)
        samples = self.stream.samples if self.stream.samples is None else self.stream.samples[self.rows]
        if samples is None or samples.shape != shape[:1]:
            given = "none" if samples is None else f"{tuple(samples.shape)}"
            raise ValueError(
                f"{type(self).__name__.lower()} {self.site!r} requires the global sample index of each row "
                f"(input {tuple(shape)}, samples {given}); set stream.samples to an int64 tensor, one number per row"
            )
        index = partial_index(shape[1:], {dim - 1: part for dim, part in window.items()}, device)
        if torch.compiler.is_compiling():  # as a tensor, or the compiler would make one program for each site
            return bits(0, samples.to(device) ^ self._key_tensor), index
        return bits(self._key, samples.to(device)), index


class Dropout(RandomSite):
    """Dropout whose mask does not depend on the layout."""

    stream: RandomStream

    def __init__(self, p: float, site: str, stream: RandomStream) -> None:
        super().__init__(site, stream)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return torch.where(self.mask(x.shape, self.window, x.device), x * scale, 0)

    def scaled_mask(self, shape: Sequence[int], window: PartialDims, like: Tensor) -> Tensor | None:
        """The factors of a part of an input: 0, or one over the keep probability. None where nothing is dropped."""
        if not self.training or self.p == 0:
            return None
        return self.mask(shape, window, like.device).to(like.dtype) / (1 - self.p)

    def mask(self, shape: Sequence[int], window: PartialDims, device: torch.device) -> Tensor:
        """The mask of a part of an input, true where an element is kept."""
        return keep_mask(*self.keys_and_index(shape, window, device), self.p).view(*shape)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site!r}"


class RandomDraws(RandomSite):
    """Random numbers for a tensor [sample, ...], of its shape and dtype.

    Before `attach_stream` binds it to a site and a stream it draws from torch's generator.
    """

    def __init__(self, site: str = "", stream: RandomStream | None = None) -> None:
        super().__init__(site, stream)

    def uniform(self, like: Tensor) -> Tensor:
        """In [0, 1)."""
        out: Tensor = self(like, uniform)
        return out

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal."""
        out: Tensor = self(like, normal)
        return out

    def forward(self, like: Tensor, draw: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> Tensor:
        if self.stream is None:
            return torch.rand_like(like) if draw is uniform else torch.randn_like(like)
        return draw(*self.keys_and_index(like.shape, self.window, like.device), like.dtype).view(like.shape)

    def extra_repr(self) -> str:
        return f"site={self.site!r}"


UNSUPPORTED_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def unsupported_dropouts(model: nn.Module) -> list[str]:
    """Name the modules that draw random masks in another way than `nn.Dropout`."""
    unsupported = []
    for path, module in model.named_modules():
        inside = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        if inside or (isinstance(module, UNSUPPORTED_DROPOUTS) and module.p > 0):
            unsupported.append(f"{path or 'the model'} ({type(module).__name__})")
    return unsupported


def attach_stream(model: nn.Module, stream: RandomStream) -> int:
    """Replace every `nn.Dropout` of a module tree by a `Dropout`, and bind every unbound `RandomDraws` to the stream.
    The site is the qualified name. Returns the number of modules.

    Modules that draw random masks in another way are rejected: their masks would change with the layout.
    """
    unsupported = unsupported_dropouts(model)
    dropouts: list[tuple[nn.Module, str, nn.Dropout, str]] = []
    draws = {path: m for path, m in model.named_modules() if isinstance(m, RandomDraws) and m.stream is None}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                dropouts.append((module, name, child, f"{path}.{name}" if path else name))
    if unsupported:
        raise ValueError(
            f"dropout other than nn.Dropout would change with the layout ({', '.join(unsupported)}); "
            "use nn.Dropout, or set its probability to 0"
        )
    for parent, name, child, site in dropouts:
        setattr(parent, name, Dropout(child.p, site, stream).train(child.training))
    for site, module in draws.items():
        module.bind(site, stream)
    return len(dropouts) + len(draws)
