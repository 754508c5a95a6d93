"""Conversions of shardings, forward and backward, against the full tensor and its full gradient."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRank, run_on_threads
from torch import Tensor

from echelon.parallel.auto_sharding.shard_conversion import convert, local_shape, own_slice, rank_dim_first
from echelon.parallel.auto_sharding.sharding import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    Sharding,
    ShardingConversion,
    conversion,
    shard,
)

SHAPE = (8, 24, 4)
STATES = (REPLICATE, BROADCAST, PARTIAL, shard(0), shard(1), shard(2), shard(0, 2), shard(1, 2), shard(1, 3))
LEGAL = [(a, b) for a, b in product(STATES, STATES) if conversion(a, b) is not None]
ILLEGAL = [(a, b) for a, b in product(STATES, STATES) if conversion(a, b) is None]


def random(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(full: Tensor, size: int, seed: int) -> list[Tensor]:
    """Terms of which the tensor is the sum."""
    terms = [random(seed + index) for index in range(size - 1)]
    return [*terms, full - sum(terms)]


def held(full: Tensor, state: Sharding, axis: Any, *, gradient: bool) -> Tensor:
    """What a rank holds of a tensor, or of its gradient, in a state."""
    if state.kind == "S":
        return own_slice(full, state, axis)
    is_sum = state.kind == ("B" if gradient else "P")
    return parts(full, axis.size, 50 + gradient)[axis.index] if is_sum else full


def check(found: list[Tensor], full: Tensor, state: Sharding, *, gradient: bool) -> None:
    if state.kind == ("B" if gradient else "P"):
        torch.testing.assert_close(sum(found), full)
        return
    for index, local in enumerate(found):
        axis = ThreadRank(index, [None] * len(found), None)  # type: ignore[arg-type]
        torch.testing.assert_close(local, held(full, state, axis, gradient=gradient))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("source", "target"), LEGAL, ids=str)
def test_a_conversion_keeps_the_tensor_and_its_gradient(source: Sharding, target: Sharding, size: int) -> None:
    full, gradient = random(1), random(2)
    if any(state.kind == "S" and SHAPE[state.dim] % (size * state.blocks) for state in (source, target)):
        pytest.skip("no equal slices")

    def rank(axis: ThreadRank) -> tuple[Tensor, Tensor, list[str]]:
        x = held(full, source, axis, gradient=False).clone().requires_grad_()
        out = convert(x, source, target, axis)  # type: ignore[arg-type]
        assert tuple(out.shape) == local_shape(SHAPE, target, size)
        assert out.is_contiguous()
        out.backward(held(gradient, target, axis, gradient=True))
        assert x.grad is not None
        return out.detach(), x.grad, axis.issued

    ranks = run_on_threads(size, rank)
    check([out for out, _, _ in ranks], full, target, gradient=False)
    check([grad for _, grad, _ in ranks], gradient, source, gradient=True)
    expected = conversion(source, target)
    assert expected is not None
    for _, _, issued in ranks:
        assert issued == [op for op in (expected.forward, expected.backward) if op]


@pytest.mark.parametrize(("source", "target"), ILLEGAL, ids=str)
def test_what_has_no_conversion_is_refused(source: Sharding, target: Sharding) -> None:
    axis = ThreadRank(0, [None, None], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"no collective makes {target} of {source}"):
        convert(random(0), source, target, axis)  # type: ignore[arg-type]


def test_the_table_of_conversions() -> None:
    """Of any two states: a partial sum is never made, and a broadcast tensor is never whole again."""
    for source, target in ILLEGAL:
        assert target == PARTIAL or (source.kind, target.kind) == ("B", "R"), (source, target)
    assert conversion(shard(1), shard(1)) == ShardingConversion()


def test_slices_of_blocks_are_those_of_each_block() -> None:
    """Of q, k and v in one dimension, a rank has its heads of each."""
    q, k, v = (torch.arange(4) + 10 * number for number in range(3))
    by_rank = rank_dim_first(torch.cat((q, k, v)), shard(0, 3), 2)
    assert by_rank.tolist() == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex128])
def test_masks_and_complex_numbers_are_gathered_and_exchanged(dtype: torch.dtype) -> None:
    full = torch.view_as_complex(random(3).view(8, 24, 2, 2)) if dtype.is_complex else (random(3) * 3).to(dtype)

    def rank(axis: ThreadRank) -> tuple[Tensor, Tensor]:
        mine = own_slice(full, shard(0), axis)  # type: ignore[arg-type]
        return convert(mine, shard(0), REPLICATE, axis), convert(mine, shard(0), shard(1), axis)  # type: ignore[arg-type]

    for index, (gathered, exchanged) in enumerate(run_on_threads(2, rank)):
        assert torch.equal(gathered, full)
        assert torch.equal(exchanged, full.chunk(2, 1)[index])


def test_complex_gradients_are_reduced() -> None:
    def rank(axis: ThreadRank) -> Tensor:
        x = torch.ones(4, dtype=torch.complex128, requires_grad=True)
        (convert(x, REPLICATE, BROADCAST, axis) * (axis.index + 1j)).real.sum().backward()  # type: ignore[arg-type]
        assert x.grad is not None
        return x.grad

    first, second = run_on_threads(2, rank)
    assert torch.equal(first, second)
    assert torch.equal(first, torch.full((4,), 1 - 2j, dtype=torch.complex128))
