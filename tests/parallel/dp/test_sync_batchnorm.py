"""BatchNorm over dp ranks against torch's own on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.dp import sync_batchnorm

ROWS, CHANNELS = 12, 3
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with length": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (4, 2)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.3, "eps": 1e-2},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
}


@dataclass(frozen=True)
class Outcome:
    outputs: Tensor
    """of two training batches and one evaluation"""
    of_input: Tensor
    parameters: dict[str, Tensor]
    """gradients"""
    buffers: dict[str, Tensor]


def build(kind: str, setting: str) -> nn.Module:
    module, _ = KINDS[kind]
    torch.manual_seed(3)
    made = nn.Sequential(module(CHANNELS, **SETTINGS[setting])).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def run(model: nn.Module, kind: str, rows: slice, offset: float) -> Outcome:
    source = torch.Generator().manual_seed(5)
    shape = (ROWS, CHANNELS, *KINDS[kind][1])
    outputs = []
    for step in range(3):
        model.train(step < 2)
        x = torch.randn(shape, generator=source, dtype=torch.float64) + offset
        weight = torch.randn(shape, generator=source, dtype=torch.float64)
        own = x[rows].requires_grad_()
        out = model(own)
        outputs.append(out.detach())
        if step < 2:
            # Not linear in the output: a mean taken over some of the rows only would show.
            (out.square() * weight[rows]).sum().backward()
            assert own.grad is not None
            of_input = own.grad
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(torch.stack(outputs), of_input, gradients, dict(model.named_buffers()))


def synchronised(kind: str, setting: str, offset: float) -> Outcome:
    """On a rank: its rows."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = build(kind, setting)
    assert (
        sync_batchnorm.convert_sync_batchnorm(model, MeshAxes(Mesh(Layout.parse(f"dp={world}")), rank, ["dp"])["dp"])
        == 1
    )
    size = ROWS // world
    return run(model, kind, slice(rank * size, (rank + 1) * size), offset)


CASES = [
    *((kind, "plain", 0.0, world) for kind in KINDS for world in (2, 3)),
    *(("2d", setting, 0.0, 2) for setting in SETTINGS),
    ("2d", "plain", 1e4, 2),
]


@pytest.mark.parametrize(("kind", "setting", "offset", "world"), CASES)
def test_equals_torch_on_the_whole_batch(pool: RankPool, kind: str, setting: str, offset: float, world: int) -> None:
    truth = run(build(kind, setting), kind, slice(None), offset)
    found = pool.run(synchronised, world, kind, setting, offset)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if offset else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([each.outputs for each in found], dim=1), truth.outputs, **tolerance)
    torch.testing.assert_close(torch.cat([each.of_input for each in found]), truth.of_input, **tolerance)
    for name, gradient in truth.parameters.items():
        # A rank's gradient is of its own rows; the data-parallel sum is somebody else's work.
        torch.testing.assert_close(sum(each.parameters[name] for each in found), gradient, **tolerance)
    for each in found:
        assert each.buffers.keys() == truth.buffers.keys()
        for name, buffer in truth.buffers.items():
            torch.testing.assert_close(each.buffers[name], buffer, **tolerance, msg=name)


def test_every_batchnorm_is_replaced_and_keeps_its_names() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4), nn.LayerNorm(4)))
    names = [name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()]
    parameters = list(model.parameters())
    axis = MeshAxes(Mesh(Layout.parse("dp=1")), 0, ["dp"])["dp"]
    assert sync_batchnorm.convert_sync_batchnorm(model, axis) == 2
    assert sync_batchnorm.convert_sync_batchnorm(model, axis) == 0
    assert ([name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()]) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
