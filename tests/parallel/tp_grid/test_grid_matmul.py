"""Products on grids: equal to the whole ones, padded or not, and moving what the papers say, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from torch import Tensor
from torch.nn import functional as F

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.layout.placement import DimSplit, LogicalParam
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis
from echelon.parallel.tp_grid.grid_activations import ActivationSharding
from echelon.parallel.tp_grid.grid_linear import grid_matmul
from echelon.parallel.tp_grid.grid_parallel import GRID_AXES
from echelon.parallel.tp_grid.grid_vocab import GridEmbedding
from echelon.parallel.tp_grid.matmul_3d import Grid3D
from echelon.parallel.tp_grid.summa import SummaGrid

GRIDS = {"2d": ("tp=4,tp_kind=2d", 2, 1), "2.5d": ("tp=8,tp_kind=2.5d,depth=2", 2, 2), "3d": ("tp=8,tp_kind=3d", 2, 2)}
"""layout, side and layers"""
LARGER = {**{name: layout for name, (layout, _, _) in GRIDS.items()}, "3 x 3": "tp=9,tp_kind=2d"}
"""on two ranks a place and its neighbour are each other's: a side of three tells them apart"""
EVEN, ODD = (4, 3, 8, (8, 16)), (5, 3, 7, (9, 5))
"""sequences, tokens of each, inputs, outputs of two weights"""
BYTES = 8
"""of a float64"""


@dataclass(frozen=True)
class Kind:
    """A grid, from one of its ranks."""

    axes: MeshAxes
    grid: SummaGrid | Grid3D

    @classmethod
    def of(cls, layout: str) -> Kind:
        axes = MeshAxes(Mesh(Layout.parse(layout)), dist.get_rank(), GRID_AXES)
        return cls(axes, Grid3D(axes) if "3d" in layout else SummaGrid(axes))

    def block(self, whole: Tensor, cuts: Sequence[DimSplit]) -> Tensor:
        """This rank's part of a weight, padded with zeros."""
        entry = LogicalParam(name="", names=(), shape=tuple(whole.shape), splits=tuple(cuts))
        part = whole[tuple(slice(low, high) for low, high in entry.box(self.axes.coordinates))]
        found = whole.new_zeros(entry.local_shape)
        found[tuple(slice(0, size) for size in part.shape)] = part
        return found

    def outputs(self, side: ActivationSharding) -> DimSplit:
        return DimSplit(axis=side.column_axis.name, dim=0, num_parts=side.column_axis.size)


def mine(x: Tensor, side: ActivationSharding) -> Tensor:
    """This rank's part of activations, padded with zeros."""
    width = -(-x.shape[-1] // side.column_axis.size)
    rows = side.local_sequences(x, 0)
    padded = F.pad(rows, (0, width * side.column_axis.size - x.shape[-1]))
    return padded[..., side.column_axis.index * width : (side.column_axis.index + 1) * width].clone()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor | None, truth: Tensor) -> float:
    assert found is not None
    assert found.shape == truth.shape
    return float((found.detach() - truth).abs().max()) if truth.numel() else 0.0


@dataclass(frozen=True)
class Found:
    errors: dict[str, float]
    forward: Counter[str]
    """bytes by kind of collective"""
    backward: Counter[str]


def bytes_of(counter: CountCollectives) -> Counter[str]:
    found: Counter[str] = Counter()
    for (kind, _, size), times in counter.seen.items():
        found[kind] += size * times
    return found


def product(layout: str, sizes: tuple[int, int, int, tuple[int, ...]], *, leaves: bool, head: bool) -> Found:
    """On a rank: a product of one input with several weights, there and back."""
    kind = Kind.of(layout)
    batch, length, inputs, outputs = sizes
    grid = kind.grid
    source, target = (grid.region, grid.residual) if leaves else (grid.residual, grid.region)
    x = numbers(batch, length, inputs, seed=0).requires_grad_()
    weights = [numbers(size, inputs, seed=i + 1).requires_grad_() for i, size in enumerate(outputs)]
    ys = [F.linear(x, weight) for weight in weights]
    above = [numbers(*y.shape, seed=i + 9) for i, y in enumerate(ys)]
    torch.autograd.backward(ys, above)
    cuts = grid.table_cuts() if head else grid.weight_cuts(kind.outputs(target), source)
    here = mine(x.detach(), source).requires_grad_()
    blocks = [kind.block(weight.detach(), cuts).requires_grad_() for weight in weights]
    columns = [-(-size // target.column_axis.size) for size in outputs]
    with CountCollectives() as there:
        found = grid_matmul(
            here, blocks, grid.head_matmul() if head else grid.matmul(source, target), columns, here.shape[-1]
        )
    with CountCollectives() as back:
        torch.autograd.backward(found, [mine(dy, target) for dy in above])
    errors = {f"y{i}": error(y, mine(ys[i].detach(), target)) for i, y in enumerate(found)}
    assert x.grad is not None
    errors["dx"] = error(here.grad, mine(x.grad, source))
    for i, (block, weight) in enumerate(zip(blocks, weights, strict=True)):
        assert block.grad is not None
        assert weight.grad is not None
        for axis in grid.replicated_axes:  # as the engine does once a step
            kind.axes[axis].all_reduce(block.grad)
        errors[f"dw{i}"] = error(block.grad, kind.block(weight.grad, cuts))
    return Found(errors, bytes_of(there), bytes_of(back))


@pytest.mark.parametrize("leaves", [False, True], ids=["into a region", "out of it"])
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "padded"])
@pytest.mark.parametrize("name", LARGER)
def test_a_grid_matmul_equals_one_device(pool: RankPool, name: str, sizes: tuple[int, ...], leaves: bool) -> None:
    layout = LARGER[name]
    for found in pool.run(product, Layout.parse(layout).world, layout, sizes, leaves=leaves, head=False):
        assert max(found.errors.values()) < 1e-12, found.errors


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_matmul_moves_the_bytes_of_the_paper(pool: RankPool, name: str) -> None:
    """X of b s x h, W of h x k, on q x q x d ranks, or on p x p x p.

    Optimus and Tesseract: q broadcasts each of the blocks X/(d q^2) and W/q^2 forward. Backward, those of W and as many
    reductions of dX; those of X and as many reductions of dW. 3D: X/p^2 and W/p^2 are gathered, Y/p^2 is scattered;
    backward, dY, W and X are gathered, dX and dW are scattered. Two weights that read X have it brought once.
    """
    layout, side, layers = GRIDS[name]
    batch, length, inputs, (first, second) = EVEN
    x, w = batch * length * inputs * BYTES, inputs * (first + second) * BYTES
    y = batch * length * (first + second) * BYTES
    found = pool.run(product, Layout.parse(layout).world, layout, EVEN, leaves=False, head=False)
    for each in found:
        if name == "3d":
            assert each.forward == {"all_gather": (x + w) // side**2, "reduce_scatter": y // side**2}
            assert each.backward == {"all_gather": (y + w + x) // side**2, "reduce_scatter": (x + w) // side**2}
        else:
            once = side * (x // (layers * side**2) + w // side**2)
            assert each.forward == {"broadcast": once}
            assert each.backward == {"broadcast": once, "reduce": once}


@pytest.mark.parametrize("name", LARGER)
def test_a_grid_head_equals_one_device(pool: RankPool, name: str) -> None:
    layout = LARGER[name]
    for found in pool.run(product, Layout.parse(layout).world, layout, (5, 3, 7, (9,)), leaves=False, head=True):
        assert max(found.errors.values()) < 1e-12, found.errors


def look_up(layout: str, batch: int, size: int, width: int) -> dict[str, float]:
    """On a rank: rows of a divided table, there and back."""
    kind = Kind.of(layout)
    ids = torch.randint(0, size, (batch, 3), generator=torch.Generator().manual_seed(4))
    ids[0, :2] = torch.tensor([0, size - 1])  # the edges
    table = numbers(size, width, seed=1).requires_grad_()
    whole = F.embedding(ids, table)
    above = numbers(*whole.shape, seed=2)
    whole.backward(above)
    assert table.grad is not None
    block = torch.nn.Parameter(kind.block(table.detach(), kind.grid.table_cuts()))
    rows = -(-size // kind.grid.region.column_axis.size)
    module = GridEmbedding(block, kind.grid.lookup(rows), size, None)  # type: ignore[arg-type]
    found = module(ids)
    found.backward(mine(above, kind.grid.residual))
    assert block.grad is not None
    for axis in kind.grid.replicated_axes:
        kind.axes[axis].all_reduce(block.grad)
    out = whole.detach().clone()
    here = mine(out, kind.grid.residual)
    real = min(max(batch - kind.grid.residual.batch_axis.index * len(here), 0), len(here))  # padding looks up token 0
    return {
        "out": error(found[:real], here[:real]),
        "table": error(block.grad, kind.block(table.grad, kind.grid.table_cuts())),
    }


@pytest.mark.parametrize(("batch", "size", "width"), [(4, 8, 4), (5, 257, 7), (1, 3, 5)])
@pytest.mark.parametrize("name", LARGER)
def test_a_grid_lookup_equals_one_device(pool: RankPool, name: str, batch: int, size: int, width: int) -> None:
    layout = LARGER[name]
    for found in pool.run(look_up, Layout.parse(layout).world, layout, batch, size, width):
        assert max(found.values()) < 1e-12, found


def wrong_id(layout: str, token: int) -> str:
    kind = Kind.of(layout)
    block = torch.nn.Parameter(kind.block(numbers(5, 4, seed=1), kind.grid.table_cuts()))
    module = GridEmbedding(block, kind.grid.lookup(3), 5, None)  # type: ignore[arg-type]
    try:
        module(torch.full((4, 2), token))
    except IndexError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("token", [5, -1])
def test_an_id_that_is_no_token_is_an_error(pool: RankPool, token: int) -> None:
    """On one device the look-up fails, and padding must not hide it: 5 is a padded row."""
    assert all(pool.run(wrong_id, 4, "tp=4,tp_kind=2d", token))


def test_a_size_that_does_not_divide_is_padded_at_the_end() -> None:
    side = ActivationSharding(
        MeshAxis("rows", range(4), 2, None, frozenset()), MeshAxis("columns", range(1), 0, None, frozenset())
    )
    x = torch.arange(10).view(5, 2)
    assert side.local_batch(5) == 2
    assert side.local_sequences(x, -1).tolist() == [[8, 9], [-1, -1]]
    assert side.sequence_index(2, 5, x.device).tolist() == [4, 4]
