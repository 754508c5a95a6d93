"""Attention block by block equals attention at once: output, lse, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE
from torch import Tensor

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.attention import blockwise_attention, sdpa_lse

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 12, 16
EXACT = 1e-12


@pytest.fixture(autouse=True)
def _same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds what is not a number, as it may."""
    torch.manual_seed(0)
    empty = blockwise_attention._empty_tokens_first
    monkeypatch.setattr(blockwise_attention, "_empty_tokens_first", lambda q, dtype: empty(q, dtype).fill_(nan))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels wherever they take the tensor but for its device."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "use_triton", lambda x: x.dtype in dispatch.DTYPES)


@pytest.fixture(params=[0, 3000, blockwise_attention.MAX_PENDING_BYTES], ids=["none-held", "some-held", "all-held"])
def _held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many bytes of parts wait: a part of all rows is 12 KiB in fp64."""
    monkeypatch.setattr(blockwise_attention, "MAX_PENDING_BYTES", request.param)


def nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Case:
    kv_heads: int = HEADS
    visible: Callable[[], Tensor | None] = nothing
    factor: Callable[[], Tensor | None] = nothing


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def documents() -> Tensor:
    """Two documents of other lengths in each row of the batch, causal."""
    of = torch.stack([torch.arange(LENGTH) >= cut for cut in (3, 7)])
    return ((of[:, :, None] == of[:, None, :]) & causal()).unsqueeze(1)


def with_blind_rows() -> Tensor:
    mask = torch.rand(BATCH, HEADS, LENGTH, LENGTH) < 0.4
    mask[:, :, 4:6] = False
    mask[1, 2] = False
    return mask


def dropped() -> Tensor:
    return (torch.rand(BATCH, HEADS, LENGTH, LENGTH) < 0.7).double() / 0.7


CASES = {
    "full": Case(),
    "grouped": Case(kv_heads=2),
    "one-kv-head": Case(kv_heads=1, visible=causal),
    "causal": Case(visible=causal),
    "documents": Case(kv_heads=2, visible=documents),
    "blind-rows": Case(kv_heads=2, visible=with_blind_rows),
    "dropout": Case(kv_heads=2, visible=causal, factor=dropped),
    "dropout-blind": Case(visible=with_blind_rows, factor=dropped),
}
CUTS = [([LENGTH], [LENGTH]), ([LENGTH], [1, 4, 7]), ([6, 6], [3] * 4), ([1, 4, 7], [6, 6])]
"""lengths of blocks: of rows, of keys"""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def tensors(kv_heads: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """As a model makes them: views of one product, heads beside each other."""
    qkv = torch.randn(BATCH, LENGTH, HEADS + 2 * kv_heads, HEAD_DIM, dtype=torch.float64) * scale
    q, k, v = qkv.to(dtype).transpose(1, 2).split((HEADS, kv_heads, kv_heads), dim=1)
    return q, k, v


def spread(x: Tensor) -> Tensor:
    """kv heads as often as they are read"""
    return x.repeat_interleave(HEADS // x.shape[1], dim=1)


def at_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """The truth, by autograd's own operators."""
    scores = q @ spread(k).transpose(-1, -2) * HEAD_DIM**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -inf)
    weights = scores.softmax(-1)
    weights = weights if mask is None else weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    weights = weights if factor is None else weights * factor
    return weights @ spread(v), scores.logsumexp(-1)


def slices(lengths: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(lengths))
    return [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def part(x: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    return None if x is None else x.expand(BATCH, HEADS, LENGTH, LENGTH)[:, :, rows, keys]


def pairs(rows: list[int], keys: list[int], seed: int = 0) -> list[tuple[slice, slice]]:
    """All blocks, in an order of chance."""
    found = list(itertools.product(slices(rows), slices(keys)))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    return [found[i] for i in order]


def error(a: Tensor, b: Tensor) -> float:
    """inf equals inf; what is not a number equals nothing."""
    worst = torch.where(a == b, 0.0, (a.double() - b.double()).abs()).max()
    return inf if worst.isnan() else float(worst)


@pytest.mark.usefixtures("_held")
@pytest.mark.parametrize(("rows", "keys"), CUTS, ids=str)
def test_merged_blocks_equal_full_attention(case: Case, rows: list[int], keys: list[int]) -> None:
    leaves = q, k, v = tuple(x.detach().requires_grad_() for x in tensors(case.kv_heads))
    mask, factor = case.visible(), case.factor()
    want, want_lse = at_once(q, k, v, mask, factor)
    gradient = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, gradient)

    merged = blockwise_attention.AttentionMerger(q)
    for row, key in pairs(rows, keys):
        hides, drops = part(mask, row, key), part(factor, row, key)
        merged.add(
            row, *blockwise_attention.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=hides, dropout_mask=drops)
        )
    out, lse = merged.result()
    assert error(out, want.detach()) < EXACT
    assert error(lse, want_lse.detach()) < EXACT
    assert out.transpose(1, 2).is_contiguous()

    totals = [torch.zeros_like(x) for x in (q, k, v)]
    for row, key in pairs(rows, keys):
        hides, drops = part(mask, row, key), part(factor, row, key)
        found = blockwise_attention.attend_backward(
            gradient[:, :, row],
            q[:, :, row],
            k[:, :, key],
            v[:, :, key],
            out[:, :, row],
            lse[:, :, row],
            mask=hides,
            dropout_mask=drops,
        )
        for total, where, block in zip(totals, (row, key, key), found, strict=True):
            total[:, :, where] += block
    for total, wants in zip(totals, wanted, strict=True):
        assert error(total, wants) < EXACT


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3 * BATCH * HEADS * LENGTH, blockwise_attention.MAX_SCORES])
def test_one_causal_block_equals_sdpa(kv_heads: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_attention, "MAX_SCORES", chunk)
    leaves = q, k, v = tuple(x.detach().requires_grad_() for x in tensors(kv_heads))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradient = torch.randn_like(want)
    out, lse = blockwise_attention.attend(q, k, v, causal=True)
    assert error(out, want.detach()) < EXACT
    found = blockwise_attention.attend_backward(gradient, q, k, v, out, lse, causal=True)
    for block, wanted in zip(found, torch.autograd.grad(want, leaves, gradient), strict=True):
        assert error(block, wanted) < EXACT


def test_a_mask_applies_to_a_causal_block() -> None:
    q, k, v = tensors(HEADS)
    mask = documents()
    loose = mask | ~causal()
    for one, other in zip(
        blockwise_attention.attend(q, k, v, causal=True, mask=loose),
        blockwise_attention.attend(q, k, v, mask=mask),
        strict=True,
    ):
        assert error(one, other) < EXACT


def test_fully_masked_rows() -> None:
    q, k, v = tensors(2)
    mask = torch.zeros(LENGTH, dtype=torch.bool)
    out, lse = blockwise_attention.attend(q, k, v, mask=mask)
    assert not out.any()
    assert (lse == -inf).all()
    found = blockwise_attention.attend_backward(torch.randn_like(out), q, k, v, out, lse, mask=mask)
    assert not any(block.any() for block in found)

    merged = blockwise_attention.AttentionMerger(q)
    merged.add(slice(2, 8), out[:, :, 2:8], lse[:, :, 2:8])
    out, lse = merged.result()
    assert not out.any()
    assert (lse == -inf).all()


def test_huge_scores_do_not_overflow() -> None:
    q, k, v = tensors(2, scale=1e3)  # scores of a million: exp of them is no number
    want, want_lse = at_once(q, k, v, causal(), None)
    merged = blockwise_attention.AttentionMerger(q)
    for row, key in pairs([5, 7], [4, 4, 4]):
        mask = part(causal(), row, key)
        merged.add(row, *blockwise_attention.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=mask))
    out, lse = merged.result()
    assert error(out, want) < EXACT * float(want.abs().max())
    assert error(lse, want_lse) < EXACT * float(want_lse.abs().max())


@pytest.mark.usefixtures("_held")
def test_the_order_of_blocks_does_not_matter() -> None:
    q, k, v = tensors(2)
    want, want_lse = at_once(q, k, v, None, None)
    for order in itertools.permutations(slices([2, 7, 1, 2])):
        merged = blockwise_attention.AttentionMerger(q)
        for key in order:
            merged.add(slice(None), *blockwise_attention.attend(q, k[:, :, key], v[:, :, key]))
        out, lse = merged.result()
        assert error(out, want) < EXACT
        assert error(lse, want_lse) < EXACT


@pytest.mark.usefixtures("_held")
@pytest.mark.parametrize("most", [1, 2, blockwise_attention.MAX_PENDING])
def test_gradient_accumulation_over_row_ranges(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_attention, "MAX_PENDING", most)
    x = tensors(2)[1]
    total, want = blockwise_attention.GradientAccumulator(x), torch.zeros_like(x)
    for rows in (slice(None), slice(6, None), slice(2, 9), slice(6, None), slice(0, 1), slice(None)):
        part = torch.randn_like(x[:, :, rows])
        total.add(rows, part)
        want[:, :, rows] += part
        assert error(total.result(), want) < EXACT
    assert not blockwise_attention.GradientAccumulator(x).result().any()
    some = blockwise_attention.GradientAccumulator(x)
    some.add(slice(1, 3), x[:, :, 1:3])
    assert error(some.result(), F.pad(x[:, :, 1:3], (0, 0, 1, LENGTH - 3))) == 0


@pytest.mark.usefixtures("kernels", "_held")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 16), (3, 24), (12, 16)])
def test_triton_merge_equals_plain_torch(dtype: torch.dtype, tolerance: float, heads: int, head_dim: int) -> None:
    q, k, v = (torch.randn(BATCH, LENGTH, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2) for _ in range(3))
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH, device=DEVICE) < 0.4
    mask[:, :, 3] = False
    wide = [x.double() for x in (q, k, v)]
    merged, truth, total = (
        blockwise_attention.AttentionMerger(q),
        blockwise_attention.AttentionMerger(wide[0]),
        blockwise_attention.GradientAccumulator(q),
    )
    sums = torch.zeros_like(wide[0])
    for row, key in pairs([5, 1, 6], [4, 4, 4]):
        out, lse = blockwise_attention.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=mask[:, :, row, key])
        merged.add(row, out, lse)
        truth.add(row, out.double(), lse.double())
        total.add(row, out)
        sums[:, :, row] += out.double()
    out, lse = merged.result()
    want, want_lse = truth.result()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert error(out, want) < tolerance
    assert error(lse, want_lse) < 2e-6
    assert (lse[:, :, 3] == -inf).all()
    assert error(total.result(), sums) < 2 * tolerance


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads_first", [True, False])
def test_triton_accumulates_in_place_in_fp32(heads_first: bool) -> None:
    total, part = (
        torch.randn(BATCH, 6, LENGTH, 24, device=DEVICE),
        torch.randn(BATCH, 6, 5, 24, device=DEVICE).bfloat16(),
    )
    if not heads_first:
        total, part = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (total, part))
    want = total.clone()
    want[:, :, 4:9] += part
    blockwise_attention.accumulate_(total[:, :, 4:9], part)
    assert error(total, want) == 0
    other = total.transpose(-1, -2).contiguous().transpose(-1, -2)  # numbers of a head apart from each other
    blockwise_attention.accumulate_(other[:, :, :5], part)
    assert error(other[:, :, :5], total[:, :, :5] + part) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_16_bit_dtypes_accumulate_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = tensors(2, dtype)
    want, want_lse = at_once(q.double(), k.double(), v.double(), causal(), None)
    merged = blockwise_attention.AttentionMerger(q)
    for row, key in pairs([5, 7], [4, 4, 4]):
        mask = part(causal(), row, key)
        merged.add(row, *blockwise_attention.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=mask))
    out, lse = merged.result()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert error(out, want) < tolerance
    assert error(lse, want_lse) < 2e-6  # also of bfloat16: scores are made in 32 bits
    found = blockwise_attention.attend_backward(torch.ones_like(out), q, k, v, out, lse, mask=causal())
    assert [block.dtype for block in found] == [dtype] * 3


class TestCudnn:
    """What stands around cuDNN's calls, with plain torch in their place."""

    @pytest.fixture(autouse=True)
    def _in_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
            found = (q @ spread(k).transpose(-1, -2)).div_(HEAD_DIM**0.5)
            return found if bias is None else found + bias

        def forward(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
        ) -> tuple[Tensor, Tensor]:
            assert scale is None
            found = scores(q, k, bias)
            return found.softmax(-1) @ spread(v), found.logsumexp(-1)

        def back(
            g: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            lse: Tensor,
            bias: Tensor | None,
            causal: bool,
            scale: float | None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            assert scale is None
            assert g.transpose(1, 2).is_contiguous()
            assert out.transpose(1, 2).is_contiguous()
            assert lse.is_contiguous()
            weights = (scores(q, k, bias) - lse.unsqueeze(-1)).exp()
            ds = weights * (g @ spread(v).transpose(-1, -2) - (g * out).sum(-1, keepdim=True)) * HEAD_DIM**-0.5
            shape = (BATCH, k.shape[1], -1, *k.shape[2:])
            dk, dv = ((a.transpose(-1, -2) @ b).view(shape).sum(2) for a, b in ((ds, q), (weights, g)))
            return ds @ spread(k), dk, dv

        monkeypatch.setattr(compat, "cudnn_attention", forward)
        monkeypatch.setattr(compat, "cudnn_attention_backward", back)

    @pytest.mark.parametrize("kind", ["blind-rows", "documents", "keys-alone", "one-query-row", "full"])
    def test_a_mask_is_a_number_that_is_added(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = tensors(2)
        mask = {
            "keys-alone": torch.arange(LENGTH) < 5,
            "one-query-row": (torch.arange(LENGTH) < 5).expand(BATCH, 1, 1, LENGTH),
        }.get(kind, CASES[kind].visible() if kind in CASES else None)
        gradient = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
        want = blockwise_attention.attend(q, k, v, mask=mask)
        wanted = blockwise_attention.attend_backward(gradient, q, k, v, *want, mask=mask)
        monkeypatch.setattr(sdpa_lse, "find_kernel", sdpa_lse._CudnnKernel)
        found = blockwise_attention.attend(q, k, v, mask=mask)
        parts = blockwise_attention.attend_backward(gradient, q, k, v, *found, mask=mask)
        for one, other in zip((*found, *parts), (*want, *wanted), strict=True):
            assert error(one, other) < EXACT

    def test_without_a_gpu_there_is_none(self) -> None:
        q, k, v = (x.bfloat16() for x in tensors(2))
        assert sdpa_lse.find_kernel(q, k, v, None, True) is None
