"""Attention block by block equals attention at once: output, lse, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.kernels import blocks

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 12, 16
EXACT = 1e-12


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


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
CUTS = ([LENGTH], [6, 6], [1, 4, 7], [3] * 4)


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


@pytest.mark.parametrize("rows", CUTS, ids=str)
@pytest.mark.parametrize("keys", CUTS, ids=str)
def test_any_blocks_give_the_whole(case: Case, rows: list[int], keys: list[int]) -> None:
    leaves = q, k, v = tuple(x.detach().requires_grad_() for x in tensors(case.kv_heads))
    mask, factor = case.visible(), case.factor()
    want, want_lse = at_once(q, k, v, mask, factor)
    gradient = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, gradient)

    merged = blocks.Merged(q)
    for row, key in pairs(rows, keys):
        hides, drops = part(mask, row, key), part(factor, row, key)
        merged.add(row, *blocks.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=hides, factor=drops))
    out, lse = merged.result()
    assert error(out, want.detach()) < EXACT
    assert error(lse, want_lse.detach()) < EXACT
    assert out.transpose(1, 2).is_contiguous()

    totals = [torch.zeros_like(x) for x in (q, k, v)]
    for row, key in pairs(rows, keys):
        hides, drops = part(mask, row, key), part(factor, row, key)
        found = blocks.attend_back(
            gradient[:, :, row],
            q[:, :, row],
            k[:, :, key],
            v[:, :, key],
            out[:, :, row],
            lse[:, :, row],
            mask=hides,
            factor=drops,
        )
        for total, where, block in zip(totals, (row, key, key), found, strict=True):
            total[:, :, where] += block
    for total, wants in zip(totals, wanted, strict=True):
        assert error(total, wants) < EXACT


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3 * BATCH * HEADS * LENGTH, blocks.CHUNK])
def test_one_causal_block_is_torch_s_own(kv_heads: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK", chunk)
    leaves = q, k, v = tuple(x.detach().requires_grad_() for x in tensors(kv_heads))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradient = torch.randn_like(want)
    out, lse = blocks.attend(q, k, v, causal=True)
    assert error(out, want.detach()) < EXACT
    found = blocks.attend_back(gradient, q, k, v, out, lse, causal=True)
    for block, wanted in zip(found, torch.autograd.grad(want, leaves, gradient), strict=True):
        assert error(block, wanted) < EXACT


def test_a_mask_hides_from_a_causal_block_as_well() -> None:
    q, k, v = tensors(HEADS)
    mask = documents()
    loose = mask | ~causal()
    for one, other in zip(
        blocks.attend(q, k, v, causal=True, mask=loose), blocks.attend(q, k, v, mask=mask), strict=True
    ):
        assert error(one, other) < EXACT


def test_rows_that_see_nothing() -> None:
    q, k, v = tensors(2)
    mask = torch.zeros(LENGTH, dtype=torch.bool)
    out, lse = blocks.attend(q, k, v, mask=mask)
    assert not out.any()
    assert (lse == -inf).all()
    found = blocks.attend_back(torch.randn_like(out), q, k, v, out, lse, mask=mask)
    assert not any(block.any() for block in found)

    merged = blocks.Merged(q)
    merged.add(slice(2, 8), out[:, :, 2:8], lse[:, :, 2:8])
    out, lse = merged.result()
    assert not out.any()
    assert (lse == -inf).all()


def test_huge_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = tensors(2, scale=1e3)  # scores of a million: exp of them is no number
    want, want_lse = at_once(q, k, v, causal(), None)
    merged = blocks.Merged(q)
    for row, key in pairs([5, 7], [4, 4, 4]):
        mask = part(causal(), row, key)
        merged.add(row, *blocks.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=mask))
    out, lse = merged.result()
    assert error(out, want) < EXACT * float(want.abs().max())
    assert error(lse, want_lse) < EXACT * float(want_lse.abs().max())


def test_the_order_of_blocks_does_not_matter() -> None:
    q, k, v = tensors(2)
    results = []
    for order in itertools.permutations(slices([2, 7, 3])):
        merged = blocks.Merged(q)
        for key in order:
            merged.add(slice(None), *blocks.attend(q, k[:, :, key], v[:, :, key]))
        results.append(merged.result())
    for out, lse in results[1:]:
        assert error(out, results[0][0]) < EXACT
        assert error(lse, results[0][1]) < EXACT


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_short_types_are_summed_in_32_bits(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = tensors(2, dtype)
    want, want_lse = at_once(q.double(), k.double(), v.double(), causal(), None)
    merged = blocks.Merged(q)
    for row, key in pairs([5, 7], [4, 4, 4]):
        mask = part(causal(), row, key)
        merged.add(row, *blocks.attend(q[:, :, row], k[:, :, key], v[:, :, key], mask=mask))
    out, lse = merged.result()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert error(out, want) < tolerance
    assert error(lse, want_lse) < 2e-6  # also of bfloat16: scores are made in 32 bits
    found = blocks.attend_back(torch.ones_like(out), q, k, v, out, lse, mask=causal())
    assert [block.dtype for block in found] == [dtype] * 3
