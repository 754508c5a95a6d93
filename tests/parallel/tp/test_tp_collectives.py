"""Where regions begin and end: what one side does forward, the other does backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis
from echelon.parallel.tp import tp_collectives

BATCH, WIDTH, STEP = 2, 2, 1e-3


def tp_axis() -> MeshAxis:
    return MeshAxes(Mesh(Layout.parse(f"tp={dist.get_world_size()}")), dist.get_rank(), ["tp"])["tp"]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(value: Tensor) -> float:
    """Over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item()


def numeric_gradients(loss: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """By finite differences, of the sum of all ranks' losses, for each rank's x in turn."""
    found = []
    for rank in range(dist.get_world_size()):
        gradient = torch.zeros_like(x)
        for index in range(x.numel()):
            values = []
            for sign in (1, -1):
                moved = x.detach().clone()
                if dist.get_rank() == rank:
                    moved.view(-1)[index] += sign * STEP
                values.append(summed(loss(moved)))
            gradient.view(-1)[index] = (values[0] - values[1]) / (2 * STEP)
        found.append(gradient)
    return found


def own_gradient(loss: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(by autograd, by finite differences) of this rank's x."""
    x.requires_grad_()
    loss(x).backward()
    assert x.grad is not None
    return x.grad, numeric_gradients(loss, x)[dist.get_rank()]


def gather_gradients(length: int) -> tuple[Tensor, Tensor]:
    axis, rank = tp_axis(), dist.get_rank()
    boundary = tp_collectives.SequenceParallelBoundary(axis)
    boundary.length = length
    weight = numbers(BATCH, length, WIDTH, seed=100 + rank)
    x = numbers(BATCH, tp_collectives.positions_per_rank(length, axis), WIDTH, seed=rank)
    # Squared, so that a gradient depends on where it is taken.
    return own_gradient(lambda value: (boundary.enter(value).square() * weight).sum(), x)


def scatter_gradients(length: int) -> tuple[Tensor, Tensor]:
    axis, rank = tp_axis(), dist.get_rank()
    boundary = tp_collectives.SequenceParallelBoundary(axis)
    weight = numbers(BATCH, tp_collectives.positions_per_rank(length, axis), WIDTH, seed=100 + rank)
    return own_gradient(
        lambda value: (boundary.leave(value).square() * weight).sum(), numbers(BATCH, length, WIDTH, seed=rank)
    )


ODD = [(2, 4), (2, 5), (2, 1), (3, 3), (3, 5), (3, 7), (3, 2)]


@pytest.mark.parametrize(("world", "length"), ODD)
@pytest.mark.parametrize("side", [gather_gradients, scatter_gradients], ids=["gather", "scatter"])
def test_gradients_are_those_of_finite_differences(
    pool: RankPool, side: Callable[[int], tuple[Tensor, Tensor]], world: int, length: int
) -> None:
    for by_autograd, by_differences in pool.run(side, world, length):
        torch.testing.assert_close(by_autograd, by_differences, rtol=1e-7, atol=1e-7)


def inner_products(length: int) -> tuple[float, float]:
    """On a rank: <gather x, y> and <x, scatter y>, summed over ranks; x is sliced, y whole."""
    axis, rank = tp_axis(), dist.get_rank()
    x = numbers(BATCH, tp_collectives.positions_per_rank(length, axis), WIDTH, seed=rank)
    y = numbers(BATCH, length, WIDTH, seed=50 + rank)
    whole = tp_collectives.all_gather_sequence(x, axis, length)
    part = tp_collectives.reduce_scatter_sequence(y, axis)
    return summed((whole * y).sum()), summed((x * part).sum())


@pytest.mark.parametrize(("world", "length"), ODD)
def test_gather_and_scatter_are_each_others_transpose(pool: RankPool, world: int, length: int) -> None:
    for left, right in pool.run(inner_products, world, length):
        assert left == pytest.approx(right, rel=1e-12)


def through_and_back(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """On a rank: a sequence that every rank holds; its slice, padded; the slices gathered."""
    axis = tp_axis()
    x = numbers(BATCH, length, WIDTH, seed=1)
    part = tp_collectives.local_sequence_slice(x, axis)
    return x, part, tp_collectives.all_gather_sequence(part, axis, length)


@pytest.mark.parametrize(("world", "length"), ODD)
def test_slices_gathered_are_the_sequence(pool: RankPool, world: int, length: int) -> None:
    for rank, (x, part, whole) in enumerate(pool.run(through_and_back, world, length)):
        assert torch.equal(whole, x)
        size = -(-length // world)
        places = torch.arange(rank * size, (rank + 1) * size).clamp(max=length - 1)  # padding repeats the last position
        assert torch.equal(part, x[:, places])


def scattered(length: int) -> tuple[Tensor, Tensor]:
    axis, rank = tp_axis(), dist.get_rank()
    x = numbers(BATCH, length, WIDTH, seed=rank)
    return x, tp_collectives.SequenceParallelBoundary(axis).leave(x.clone())


def test_leaving_a_region_reduces_and_pads_with_zeros(pool: RankPool) -> None:
    found = pool.run(scattered, 3, 7)
    total = sum(x for x, _ in found)
    padded = torch.cat([total, torch.zeros(BATCH, 2, WIDTH, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(torch.cat([part for _, part in found], dim=1), padded)


def whole_region() -> tuple[Tensor, Tensor, Tensor]:
    """On a rank: enter, multiply by this rank's factor, leave. (output, gradient of x, gradient of the factor)."""
    axis, rank = tp_axis(), dist.get_rank()
    boundary = tp_collectives.FullSequenceBoundary(axis)
    x = numbers(BATCH, 3, WIDTH, seed=1).requires_grad_()
    factor = torch.tensor(rank + 2.0, dtype=torch.float64, requires_grad=True)
    out = boundary.leave(boundary.enter(x) * factor)
    (out * numbers(BATCH, 3, WIDTH, seed=2)).sum().backward()
    assert x.grad is not None
    assert factor.grad is not None
    return out.detach(), x.grad, factor.grad


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_sequence_parallelism_leave_reduces_forward_and_enter_backward(pool: RankPool, world: int) -> None:
    x, weight = numbers(BATCH, 3, WIDTH, seed=1), numbers(BATCH, 3, WIDTH, seed=2)
    factors = sum(rank + 2.0 for rank in range(world))
    for out, of_x, of_factor in pool.run(whole_region, world):
        torch.testing.assert_close(out, x * factors)
        torch.testing.assert_close(of_x, weight * factors)
        torch.testing.assert_close(of_factor, (x * weight).sum())
