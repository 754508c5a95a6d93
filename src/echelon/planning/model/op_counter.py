"""Counts a forward pass operator by operator, without values. Imports torch: trace_module.py imports it when needed.

[Note: storages]

Every tensor is on the meta device: it has a shape and a storage, but no memory. A view shares the storage of its base,
so that the storage of a tensor tells whether it is

    a weight   a view or a cast of a parameter, or computed from parameters alone
    tp-split   the output of a column-parallel GEMM or computed from it, up to the row-parallel GEMM
    saved      saved for backward: once, however many operators save it

Attention and RMSNorm are one kernel each on CUDA, and many operators on the meta device. Stubs save what the kernels
save, and compute nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon.compat import storage_key, torch_dispatch_mode
from echelon.planning.model.known_values import KnownValues, iter_tensors
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, UNSPLIT

aten = torch.ops.aten
MATMUL_OPERANDS = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}
"""GEMMs, with the indices of their operands"""
COPIES = {aten.clone, aten._to_copy, aten.repeat}
GEMMS = {*MATMUL_OPERANDS, aten._grouped_mm, aten.convolution}
ELEMENT_BYTES = 2
"""bytes of an element in a plan; masks and indices have the same bytes in any precision"""


@dataclass(frozen=True)
class WeightUse:
    weight: str
    offset: int
    """storage offset: several matrices may share a parameter"""
    inputs: int
    outputs: int
    experts: int


@dataclass(frozen=True)
class WeightlessMatmul:
    """A GEMM without weights: m x k times k x n, `count` times."""

    count: int
    m: int
    k: int
    n: int
    distinct: float = 1.0
    """share of the second operand's matrices that are no copies: grouped queries share keys"""

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.k * self.n


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of attention, for all heads and sequences of a batch."""

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
        full = 2 * self.count * self.queries * self.keys * (self.head_dim + self.value_dim)
        return full // 2 if self.causal else full


@dataclass
class SectionCounts:
    """Counts of one section of a model, for the full batch."""

    matmul_rows: dict[WeightUse, int] = field(default_factory=dict)
    """input rows of each weight matrix"""
    lookup_rows: dict[str, int] = field(default_factory=dict)
    """rows looked up in each embedding table"""
    weightless_matmuls: list[WeightlessMatmul] = field(default_factory=list)
    attention_calls: list[AttentionCall] = field(default_factory=list)
    saved_elements: float = 0.0
    saved_elements_tp: float = 0.0
    gathered_saved: float = 0.0
    """of the saved ones, those in modules that get full sequences under context parallelism"""
    gathered_moved: float = 0.0
    shared_elements: float = 0.0
    """saved elements that another section computed: masks, RoPE angles"""
    moved_elements: float = 0.0
    moved_elements_tp: float = 0.0


class OpCounter(torch_dispatch_mode()):  # type: ignore[misc]
    """Counts every operator for the current section."""

    def __init__(self, weights: Mapping[str, Tensor], splits: Mapping[str, str]) -> None:
        super().__init__()
        self.sections: dict[str, SectionCounts] = {}
        self.splits = splits
        self._weights = {storage_key(weight): name for name, weight in weights.items()}
        # Norms may be in float32; the dtype of most elements is that of the GEMMs.
        sizes: Counter[int] = Counter()
        for weight in weights.values():
            sizes[weight.element_size()] += weight.numel()
        self._element_bytes = max(sizes, key=lambda size: sizes[size], default=4)
        self._section = ""
        self._section_of: dict[int, str] = {}
        self._tp_split: set[int] = set()
        self._distinct: dict[int, float] = {}
        """share of a storage's matrices that are no copies of others, where some are"""
        self._saved: set[int] = set()
        self._alive: list[torch.UntypedStorage] = []  # a freed storage could reuse its key
        self._paused = False
        self.is_gathering = False
        """a module runs that gets full sequences under context parallelism"""
        self.values = KnownValues()

    @property
    def section_counts(self) -> SectionCounts:
        return self.sections.setdefault(self._section, SectionCounts())

    def repeat_section(self, section: str, first: str, renamed: Mapping[str, str]) -> None:
        """Count a section as another one with other weights: `renamed`, by the names of those."""
        counts = self.sections[first]
        rows = {replace(use, weight=renamed.get(use.weight, use.weight)): n for use, n in counts.matmul_rows.items()}
        lookups = {renamed.get(weight, weight): n for weight, n in counts.lookup_rows.items()}
        # What several sections save is saved once.
        self.sections[section] = replace(counts, matmul_rows=rows, lookup_rows=lookups, shared_elements=0.0)

    def enter_section(self, section: str, carried: object = None) -> None:
        """Start a section; its input counts as computed by it."""
        self._section = section
        for tensor in iter_tensors((carried,)):
            self._section_of[storage_key(tensor)] = section

    @contextmanager
    def counting(self) -> Iterator[None]:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack_saved, _no_backward)
        with torch.enable_grad(), hooks, _KernelStubs(self), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        operator = func.overloadpacket
        out = _empty_grouped_mm(*args[:2]) if operator is aten._grouped_mm else self.values.run(func, args, kwargs)
        given, made = [*iter_tensors(args), *iter_tensors(kwargs.values())], list(iter_tensors((out,)))
        self._record_op(operator, args, given, made)
        return out

    def _record_op(self, operator: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        named = [self._weights[storage_key(tensor)] for tensor in given if storage_key(tensor) in self._weights]
        if given and len(named) == len(given):
            self._weights |= {storage_key(self._hold_storage(tensor)): named[0] for tensor in made}
            return
        split, is_gemm = UNSPLIT, operator in GEMMS and bool(named or not _is_outer_product(operator, args))
        if operator in MATMUL_OPERANDS and is_gemm:
            first, second = MATMUL_OPERANDS[operator]
            split = self._record_matmul(args[first], args[second])
        elif operator is aten._grouped_mm:
            split = self._record_grouped_mm(args[0], args[1])
        elif operator is aten.convolution:
            split = self._record_convolution(args[0], args[1], made[0], transposed=args[6])
        elif operator is aten.embedding and storage_key(args[0]) in self._weights:
            name = self._weights[storage_key(args[0])]
            self.section_counts.lookup_rows[name] = max(self.section_counts.lookup_rows.get(name, 0), args[1].numel())
        if not is_gemm:
            self._record_copies(operator, given, made)
        self.record_outputs(given, made, split, moved=not is_gemm, in_place=operator.__name__.endswith("_"))

    def _record_copies(self, operator: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Note what holds copies: of an expanded tensor, or of what holds copies."""
        keys = {storage_key(tensor) for tensor in given}
        if not made or not made[0].is_floating_point() or storage_key(made[0]) in keys:
            return  # a view shares what is noted of its storage
        shares = [self._distinct_share(tensor) for tensor in given]
        if operator not in COPIES and all(share == 1 for share in shares):
            return
        sizes = [share * tensor.numel() / max(1, made[0].numel()) for share, tensor in zip(shares, given, strict=True)]
        share = sum(sizes) if operator is aten.cat else max(sizes)
        if share < 1:
            self._distinct[storage_key(self._hold_storage(made[0]))] = share

    def record_outputs(
        self, given: list[Tensor], made: list[Tensor], split: str = UNSPLIT, *, moved: bool, in_place: bool = False
    ) -> None:
        """Record the outputs of an operator: their section, whether tp splits them, and memory traffic."""
        before = {storage_key(tensor) for tensor in given}
        fresh = [tensor for tensor in made if storage_key(tensor) not in before or in_place]
        divided = split == COLUMN_PARALLEL or (split != ROW_PARALLEL and bool(before & self._tp_split))
        for tensor in fresh:
            key = storage_key(self._hold_storage(tensor))
            self._section_of.setdefault(key, self._section)
            if divided:
                self._tp_split.add(key)
        if fresh and moved:
            amount = sum(self._elements(t, t.numel()) for t in (*given, *fresh) if storage_key(t) not in self._weights)
            if divided:
                self.section_counts.moved_elements_tp += amount
            else:
                self.section_counts.moved_elements += amount
            self.section_counts.gathered_moved += amount * self.is_gathering

    def _record_matmul(self, a: Tensor, b: Tensor) -> str:
        """Count a GEMM, and return how tp splits its weight."""
        (m, k), n, count = a.shape[-2:], b.shape[-1], a.shape[0] if a.dim() == 3 else 1
        if storage_key(b) in self._weights:
            weight, inputs, outputs, rows = b, k, n, m * count
        elif storage_key(a) in self._weights:
            weight, inputs, outputs, rows = a, k, m, n * count
        else:
            distinct = self._distinct_share(b)
            self.section_counts.weightless_matmuls.append(WeightlessMatmul(count, m, k, n, distinct))
            return UNSPLIT
        # One matrix broadcast over a batch is not several experts.
        stored = weight.untyped_storage().nbytes() // weight.element_size()
        is_stacked = weight.dim() == 3 and count > 1 and stored >= weight.numel() and weight.stride(0) != 0
        return self._record_weight(weight, inputs, outputs, rows, experts=count if is_stacked else 0)

    def _record_grouped_mm(self, x: Tensor, weight: Tensor) -> str:
        """Count the GEMM of all experts, each with the rows of its tokens."""
        experts, inputs, outputs = weight.shape
        if storage_key(weight) not in self._weights:
            self.section_counts.weightless_matmuls.append(WeightlessMatmul(1, x.shape[0], inputs, outputs))
            return UNSPLIT
        return self._record_weight(weight, inputs, outputs, x.shape[0], experts=experts)

    def _record_convolution(self, x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> str:
        if storage_key(weight) not in self._weights:
            return UNSPLIT
        pixels, first, others = x if transposed else out, weight.shape[0], prod(weight.shape[1:])
        inputs, outputs = (first, others) if transposed else (others, first)
        return self._record_weight(weight, inputs, outputs, pixels.numel() // pixels.shape[1])

    def _record_weight(self, weight: Tensor, inputs: int, outputs: int, rows: int, experts: int = 0) -> str:
        name = self._weights[storage_key(weight)]
        used = WeightUse(name, int(weight.storage_offset()), inputs, outputs, experts)
        self.section_counts.matmul_rows[used] = self.section_counts.matmul_rows.get(used, 0) + rows
        return self.splits.get(name, UNSPLIT)

    def _pack_saved(self, tensor: Tensor) -> None:
        """Count a saved tensor. Returning it would create a reference cycle with the graph; there is no backward."""
        key = storage_key(self._hold_storage(tensor))
        if key in self._saved or key in self._weights:
            return
        self._saved.add(key)
        amount = self._elements(tensor, tensor.untyped_storage().nbytes() // tensor.element_size())
        if self._section_of.get(key) != self._section:
            self.section_counts.shared_elements += amount
            return
        self.section_counts.gathered_saved += amount * self.is_gathering
        if key in self._tp_split:
            self.section_counts.saved_elements_tp += amount
        else:
            self.section_counts.saved_elements += amount

    def _elements(self, tensor: Tensor, count: int) -> float:
        element_bytes = self._element_bytes if tensor.dtype.is_floating_point else ELEMENT_BYTES
        return count * tensor.element_size() / element_bytes

    def _distinct_share(self, tensor: Tensor) -> float:
        """Share of a tensor's elements that are no copies of others."""
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        expanded = prod(size for size, stride in sizes if not stride and size > 1)
        return self._distinct.get(storage_key(tensor), 1.0) / expanded

    def _hold_storage(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor.untyped_storage())
        return tensor

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
        call = AttentionCall(
            count=prod(query.shape[:-2]),
            kv_count=round(prod(key.shape[:-2]) * self._distinct_share(key)),
            queries=query.shape[-2],
            keys=key.shape[-2],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            causal=is_causal,
        )
        self.section_counts.attention_calls.append(call)
        out: Tensor = _AttentionStub.apply(self, query, key, value, attn_mask)
        return out

    def rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        out: Tensor = _RMSNormStub.apply(self, input, weight)
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


class _AttentionStub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counter: OpCounter, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with counter.paused():
            if mask is None and q.shape == (*q.shape[:-1], v.shape[-1]):
                out = torch.empty_like(q)  # flash attention: the next operator copies it where heads come before tokens
            else:
                first, last = q.shape[:-2], (q.shape[-2], v.shape[-1])
                out = q.new_empty((*first[:-1], last[0], *first[-1:], last[1])).transpose(-2, -3)
            sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
            if mask is not None and mask.dtype == torch.bool:
                mask = q.new_empty(mask.shape)  # every call makes one of numbers, and saves that
        counter.record_outputs([q, k, v], [out, sums, *([] if mask is None else [mask])], moved=False)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out


class _RMSNormStub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counter: OpCounter, x: Tensor, weight: Tensor | None) -> Tensor:
        with counter.paused():
            out, roots = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        counter.record_outputs([x], [out, roots], moved=True)
        ctx.save_for_backward(x, weight, roots)
        return out


class _KernelStubs(TorchFunctionMode):
    """Replaces attention and RMSNorm by stubs before they decompose into operators."""

    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self._kernels: dict[Any, Any] = dict.fromkeys((F.rms_norm, torch.rms_norm), counter.rms_norm)
        self._kernels[F.scaled_dot_product_attention] = counter.attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kernels.get(func, func)(*args, **(kwargs or {}))


def _is_outer_product(operator: Any, args: Any) -> bool:
    """Whether an operator sums over one element, as the angles of rotary positions do: it moves bytes, no more."""
    return operator in MATMUL_OPERANDS and args[MATMUL_OPERANDS[operator][0]].shape[-1] == 1


def _empty_grouped_mm(x: Tensor, weight: Tensor) -> Tensor:
    """The result of rows, sorted by expert, times the matrix of their expert; torch has none in every dtype."""
    return x.new_empty((x.shape[0], weight.shape[2]))


def _no_backward(_packed: None) -> Tensor:
    raise RuntimeError("a trace has no backward")
