"""Counts what a forward pass does, operator by operator, without values. Loads torch: trace.py imports it when asked.

[Note: storage tells]

Every tensor here is on the meta device: it has a shape and a storage, but no memory. A view shares the storage of what
it is a view of. So by its storage a tensor is known as

    a weight   a view or a cast of a parameter, or computed from parameters alone
    divided    the output of a column product of tensor parallelism, or made from one, up to the row product
    saved      kept for backward: however often it is saved, it is held once

Attention and RMSNorm are one kernel each on CUDA, and many operators on the meta device. Stand-ins save what the
kernels save, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from echelon.compat import operator_mode
from echelon.planning.model.model_shape import COLUMNS, ROWS, WHOLE

aten = torch.ops.aten
PAIRS = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}
"""products, with the places of their two factors"""
ELEMENT = 2
"""bytes of an element in a plan; what is no floating point (masks, indices) keeps its bytes in any precision"""


@dataclass(frozen=True)
class Used:
    """A matrix of a parameter that something was multiplied with."""

    weight: str
    offset: int
    """where it begins in its storage: several matrices may share a parameter"""
    inputs: int
    outputs: int
    experts: int


@dataclass(frozen=True)
class Square:
    """A product without weights: m x k times k x n, `count` times."""

    count: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.k * self.n


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Attention, of all heads of all sequences of a batch."""

    count: int
    """heads of all sequences"""
    kv_count: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool

    @property
    def flops(self) -> int:
        whole = 2 * self.count * self.queries * self.keys * (self.head_dim + self.value_dim)
        return whole // 2 if self.causal else whole


@dataclass
class Tally:
    """What one section of a model did. Elements and rows are of the whole batch."""

    rows: dict[Used, int] = field(default_factory=dict)
    """that passed each matrix"""
    tables: dict[str, int] = field(default_factory=dict)
    """rows that were looked up, by the name of the table"""
    squares: list[Square] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)
    saved: float = 0.0
    saved_split: float = 0.0
    shared: float = 0.0
    """elements that it saves and did not make: masks, angles"""
    passed: float = 0.0
    passed_split: float = 0.0


class Counter(operator_mode()):  # type: ignore[misc]
    """Sees every operator while it is entered, and adds it to the section of the moment."""

    def __init__(self, weights: Mapping[str, Tensor], splits: Mapping[str, str]) -> None:
        super().__init__()
        self.tallies: dict[str, Tally] = {}
        self.splits = splits
        self._weights = {_key(weight): name for name, weight in weights.items()}
        # Norms may be kept wide; the products' type is that of the most elements.
        sizes: dict[int, int] = {}
        for weight in weights.values():
            sizes[weight.element_size()] = sizes.get(weight.element_size(), 0) + weight.numel()
        self._width = max(sizes, key=lambda size: sizes[size], default=4)
        self._section = ""
        self._born: dict[int, str] = {}
        self._divided: set[int] = set()
        self._saved: set[int] = set()
        self._alive: list[torch.UntypedStorage] = []  # one that is freed could lend its key to another
        self._quiet = False

    @property
    def tally(self) -> Tally:
        return self.tallies.setdefault(self._section, Tally())

    def enter(self, section: str, carried: object = None) -> None:
        """What comes belongs to the section. What it is handed by the section before is its own too."""
        self._section = section
        for tensor in _tensors((carried,)):
            self._born[_key(tensor)] = section

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _never))
            stack.enter_context(_StandIns(self))
            stack.enter_context(self)
            yield

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._quiet:
            given, made = [*_tensors(args), *_tensors((kwargs or {}).values())], list(_tensors((out,)))
            self._see(func.overloadpacket, args, given, made)
        return out

    def _see(self, operator: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        named = [self._weights[_key(tensor)] for tensor in given if _key(tensor) in self._weights]
        if given and len(named) == len(given):
            self._weights |= {_key(self._keep(tensor)): named[0] for tensor in made}
            return
        split = WHOLE
        if operator in PAIRS:
            first, second = PAIRS[operator]
            split = self._product(args[first], args[second])
        elif operator is aten.convolution:
            split = self._convolution(args[0], args[1], made[0], transposed=args[6])
        elif operator is aten.embedding and _key(args[0]) in self._weights:
            name = self._weights[_key(args[0])]
            self.tally.tables[name] = max(self.tally.tables.get(name, 0), args[1].numel())
        moved = operator not in PAIRS and operator is not aten.convolution
        self._made(given, made, split, moved=moved, in_place=operator.__name__.endswith("_"))

    def _made(
        self, given: list[Tensor], made: list[Tensor], split: str = WHOLE, *, moved: bool = True, in_place: bool = False
    ) -> None:
        """What came out of an operator: where it was born, whether it is divided, what moved through memory."""
        before = {_key(tensor) for tensor in given}
        fresh = [tensor for tensor in made if _key(tensor) not in before or in_place]
        divided = split == COLUMNS or (split != ROWS and bool(before & self._divided))
        for tensor in fresh:
            key = _key(self._keep(tensor))
            self._born.setdefault(key, self._section)
            if divided:
                self._divided.add(key)
        if fresh and moved:
            amount = sum(self._elements(t, t.numel()) for t in (*given, *fresh) if _key(t) not in self._weights)
            if divided:
                self.tally.passed_split += amount
            else:
                self.tally.passed += amount

    def _product(self, a: Tensor, b: Tensor) -> str:
        """Counts a times b; gives how tensor parallelism divides the weight."""
        (m, k), n, count = a.shape[-2:], b.shape[-1], a.shape[0] if a.dim() == 3 else 1
        if _key(b) in self._weights:
            weight, inputs, outputs, rows = b, k, n, m * count
        elif _key(a) in self._weights:
            weight, inputs, outputs, rows = a, k, m, n * count
        else:
            self.tally.squares.append(Square(count, m, k, n))
            return WHOLE
        # One matrix that is repeated for a batch is not many experts.
        own = weight.untyped_storage().nbytes() // weight.element_size() >= weight.numel() and weight.stride(0) != 0
        return self._use(weight, inputs, outputs, rows, experts=count if weight.dim() == 3 and count > 1 and own else 0)

    def _convolution(self, x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> str:
        if _key(weight) not in self._weights:
            return WHOLE
        across = x if transposed else out
        rows = across.numel() // across.shape[1]
        if transposed:
            return self._use(weight, weight.shape[0], prod(weight.shape[1:]), rows)
        return self._use(weight, prod(weight.shape[1:]), weight.shape[0], rows)

    def _use(self, weight: Tensor, inputs: int, outputs: int, rows: int, experts: int = 0) -> str:
        name = self._weights[_key(weight)]
        used = Used(name, int(weight.storage_offset()), inputs, outputs, experts)
        self.tally.rows[used] = self.tally.rows.get(used, 0) + rows
        return self.splits.get(name, WHOLE)

    # -- what is saved ------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> None:
        """Backward never comes. A tensor that is given back here is held by the graph that it holds, for ever."""
        key = _key(self._keep(tensor))
        if key in self._saved or key in self._weights:
            return
        self._saved.add(key)
        amount = self._elements(tensor, tensor.untyped_storage().nbytes() // tensor.element_size())
        if self._born.get(key) != self._section:
            self.tally.shared += amount
        elif key in self._divided:
            self.tally.saved_split += amount
        else:
            self.tally.saved += amount

    def _elements(self, tensor: Tensor, count: int) -> float:
        return count * tensor.element_size() / (self._width if tensor.dtype.is_floating_point else ELEMENT)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor.untyped_storage())
        return tensor

    # -- kernels that are not run -------------------------------------------------------------------------------------

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.tally.attended.append(
            Attended(
                count=prod(query.shape[:-2]),
                kv_count=prod(key.shape[:-2]),
                queries=query.shape[-2],
                keys=key.shape[-2],
                head_dim=query.shape[-1],
                value_dim=value.shape[-1],
                causal=is_causal,
            )
        )
        out: Tensor = _Attention.apply(self, query, key, value, attn_mask)
        return out

    def rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        out: Tensor = _Norm.apply(self, input, weight)
        return out

    def kernel(self, given: list[Tensor], made: list[Tensor], *, moved: bool) -> None:
        """What a stand-in makes, before it is saved."""
        self._made(given, made, moved=moved)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Operators of ours are not the model's."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counter: Counter, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with counter.quiet():
            # As flash attention lays it out: tokens before heads, so that what follows reads it without a copy.
            first, last = q.shape[:-2], (q.shape[-2], v.shape[-1])
            out = q.new_empty((*first[:-1], last[0], *first[-1:], last[1])).transpose(-2, -3)
            sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        counter.kernel([q, k, v], [out, sums], moved=False)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counter: Counter, x: Tensor, weight: Tensor | None) -> Tensor:
        with counter.quiet():
            out, roots = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        counter.kernel([x], [out, roots], moved=True)
        ctx.save_for_backward(x, weight, roots)
        return out


class _StandIns(TorchFunctionMode):
    """Gives attention and RMSNorm to the counter before they fall apart into operators."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._kernels = {
            F.scaled_dot_product_attention: counter.attention,
            F.rms_norm: counter.rms_norm,
            torch.rms_norm: counter.rms_norm,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kernels.get(func, func)(*args, **(kwargs or {}))


def _never(_packed: None) -> Tensor:
    raise RuntimeError("a trace has no backward")


def _key(tensor: Tensor) -> int:
    key: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return key


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
