"""Groups of ranks and their collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.parallel.comm.axis_names import mesh_axis_names
from echelon.parallel.comm.mesh_axis import MeshAxes, all_reduce_coalesced, enumerate_groups
from echelon.parallel.dp import zero

NAMES = [*mesh_axis_names(zero.sharding_policy(Layout(dp=2)), "dp"), "tp/2"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("tp", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("dp", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("shard", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica", tuple((rank,) for rank in range(8))),
        ("shard*tp", (tuple(range(8)),)),
        ("tp/2", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_groups_of_an_axis(name: str, groups: tuple[tuple[int, ...], ...]) -> None:
    found = enumerate_groups(Mesh(Layout.parse("dp=2,tp=4,zero=1")), name)
    assert {tuple(sorted(group)) for group in found} == set(groups)


def sums(layout: str, leave_out: str) -> dict[str, float]:
    """On a rank: the sum of all ranks' numbers over each axis."""
    axes = MeshAxes(Mesh(Layout.parse(layout)), dist.get_rank(), NAMES, drop_collective=leave_out)
    names = NAMES
    return {name: axes[name].all_reduce(torch.tensor(float(2 ** dist.get_rank()))).item() for name in names}


@pytest.mark.parametrize("leave_out", ["", "tp:all_reduce", "shard*tp:all_reduce", "tp:all_gather"])
def test_every_axis_sums_over_its_ranks_and_a_dropped_one_does_not(pool: RankPool, leave_out: str) -> None:
    layout = "dp=2,tp=4,zero=1"
    mesh = Mesh(Layout.parse(layout))
    for rank, found in enumerate(pool.run(sums, 8, layout, leave_out)):
        for name, total in found.items():
            group = next(g for g in enumerate_groups(mesh, name) if rank in g)
            left_out = leave_out == f"{name}:all_reduce"
            assert total == (2**rank if left_out else sum(2**peer for peer in group)), name


def moves(leave_out: str) -> tuple[Tensor, Tensor, Tensor]:
    """On a rank: gathered, scattered, and gathered where the part lies in the whole already."""
    axis = MeshAxes(Mesh(Layout.parse("tp=3")), dist.get_rank(), ["tp"], drop_collective=leave_out)["tp"]
    mine = torch.arange(2.0) + 10 * axis.index
    whole, part, place = torch.full((6,), -1.0), torch.empty(2), torch.full((6,), -1.0)
    axis.start_all_gather(whole, mine).wait()
    axis.start_reduce_scatter(part, torch.arange(6.0) * (axis.index + 1)).wait()
    place[2 * axis.index : 2 * axis.index + 2] = mine
    axis.start_all_gather(place, place[2 * axis.index : 2 * axis.index + 2]).wait()
    return whole, part, place


def test_shards_are_gathered_and_scattered_in_the_order_of_the_axis(pool: RankPool) -> None:
    for rank, (whole, part, place) in enumerate(pool.run(moves, 3, "")):
        assert whole.tolist() == place.tolist() == [0, 1, 10, 11, 20, 21]
        assert part.tolist() == [6.0 * (2 * rank), 6.0 * (2 * rank + 1)]


def test_a_dropped_collective_leaves_local_values(pool: RankPool) -> None:
    for rank, (whole, _, place) in enumerate(pool.run(moves, 3, "tp:all_gather")):
        expected = [0.0] * 6  # the same way every time, not what the memory held before
        expected[2 * rank : 2 * rank + 2] = [10.0 * rank, 10.0 * rank + 1]
        assert whole.tolist() == place.tolist() == expected
    for rank, (_, part, _) in enumerate(pool.run(moves, 3, "tp:reduce_scatter")):
        assert part.tolist() == [2.0 * rank * (rank + 1), (2.0 * rank + 1) * (rank + 1)]


def many() -> tuple[list[float], list[float]]:
    axis = MeshAxes(Mesh(Layout.parse("dp=2")), dist.get_rank(), ["dp"])["dp"]
    buffer = torch.arange(5.0) + axis.index
    views = [buffer[:2], buffer[4:]]
    all_reduce_coalesced(axis, views)
    all_reduce_coalesced(axis, [])
    return buffer.tolist(), [view.sum().item() for view in views]


def test_small_tensors_share_one_all_reduce(pool: RankPool) -> None:
    for rank, (buffer, _) in enumerate(pool.run(many, 2)):
        assert buffer == [1.0, 3.0, 2.0 + rank, 3.0 + rank, 9.0]


def test_on_one_rank_every_collective_is_a_no_op() -> None:
    """No process group is needed, nor asked for."""
    axes = MeshAxes(Mesh(Layout.parse("dp=1")), 0, NAMES)
    value, whole, part = torch.ones(2), torch.zeros(2), torch.ones(2)
    for name in NAMES:
        axes[name].start_all_gather(whole, part).wait()
        axes[name].start_reduce_scatter(part, whole).wait()
        assert torch.equal(axes[name].broadcast(axes[name].all_reduce(value)), torch.ones(2))
    assert torch.equal(whole, torch.ones(2))
