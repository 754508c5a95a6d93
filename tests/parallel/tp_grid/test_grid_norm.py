"""Norms over divided columns: those of all columns, also where some are padding, or all are far from zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.kernels import tensor_metadata
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.tp_grid.grid_norm import (
    ColumnShards,
    GridLayerNorm,
    GridRMSNorm,
    GridStreamLayerNorm,
    GridStreamRMSNorm,
)

TOKENS, EPSILON = (2, 3), 1e-5


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, columns: ColumnShards) -> Tensor:
    """This rank's columns, padded with zeros."""
    padded = F.pad(x, (0, columns.padded_width * columns.axis.size - columns.width))
    return padded[
        ..., columns.axis.index * columns.padded_width : (columns.axis.index + 1) * columns.padded_width
    ].clone()


def compare(kind: str, width: int, offset: float, recompute: bool) -> dict[str, float]:
    """On a rank: a norm of each kind there and back, against torch's on the whole."""
    axis = MeshAxes(Mesh(Layout.parse(f"tp={dist.get_world_size()}")), dist.get_rank(), ["tp"])["tp"]
    columns = ColumnShards(axis, width)
    x = (numbers(*TOKENS, width, seed=0) + offset).requires_grad_()
    weight, bias = numbers(width, seed=1).requires_grad_(), numbers(width, seed=2).requires_grad_()
    whole: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: F.layer_norm(x, (width,), weight, bias, EPSILON),
        "layer without vectors": lambda: F.layer_norm(x, (width,), None, None, EPSILON),
        "rms": lambda: F.rms_norm(x, (width,), weight, EPSILON),
        "stream rms": lambda: F.rms_norm(x + x, (width,), weight, EPSILON),
        "stream layer": lambda: F.layer_norm(x + x, (width,), weight, bias, EPSILON),
    }
    truth, above = whole[kind](), numbers(*TOKENS, width, seed=3)
    truth.backward(above)
    mine = part(x.detach(), columns).requires_grad_()
    w, b = (nn.Parameter(part(vector.detach(), columns)) for vector in (weight, bias))
    made: dict[str, Callable[[], nn.Module]] = {
        "layer": lambda: GridLayerNorm(w, b, columns, EPSILON),
        "layer without vectors": lambda: GridLayerNorm(None, None, columns, EPSILON),
        "rms": lambda: GridRMSNorm(w, columns, EPSILON),
        "stream rms": lambda: GridStreamRMSNorm(w, columns, EPSILON),
        "stream layer": lambda: GridStreamLayerNorm(w, b, columns, EPSILON),
    }
    module: Any = made[kind]()
    module.recompute_output = recompute
    found = module(mine, mine)[1] if kind.startswith("stream") else module(mine)
    again = tensor_metadata.read(found).recompute(None) if recompute else found
    found.backward(part(above, columns))
    pairs = {"out": (found, truth), "again": (again, truth), "x": (mine.grad, x.grad)}
    pairs |= {"weight": (w.grad, weight.grad), "bias": (b.grad, bias.grad)}
    return {
        name: float((value.detach() - part(expected.detach(), columns)).abs().max())
        for name, (value, expected) in pairs.items()
        if value is not None and expected is not None
    }


@pytest.mark.parametrize("kind", ["layer", "layer without vectors", "rms", "stream rms", "stream layer"])
@pytest.mark.parametrize(
    ("width", "offset", "bound"), [(6, 0.0, 1e-12), (7, 0.0, 1e-12), (4, 0.0, 1e-12), (7, 1e6, 1e-7)]
)
def test_a_grid_norm_equals_one_device(pool: RankPool, kind: str, width: int, offset: float, bound: float) -> None:
    """Of three ranks the last has one real column of seven, and none of four. An offset of 1e6 leaves ten digits."""
    for found in pool.run(compare, 3, kind, width, offset, width == 7):
        assert {"out", "x"} <= found.keys()
        assert max(found.values()) < bound, found
