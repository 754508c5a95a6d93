"""Mesh: coordinates and groups as partitions of the world, without a process."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.layout import Layout, Mesh

AXES = ["pp", "replica", "shard", "cp", "tp", "dp"]


@st.composite
def meshes(draw):
    size = st.integers(1, 3)
    shard = draw(size)
    degrees = {"tp": draw(size), "cp": draw(size), "pp": draw(size), "zero": draw(st.integers(0, 3))}
    layout = Layout(dp=shard * draw(size), shard=shard, **degrees)
    return Mesh(layout, draw(st.sampled_from([("pp", "dp"), ("dp", "pp")])))


AXIS_SETS = st.one_of(st.sampled_from(AXES), st.lists(st.sampled_from(AXES), max_size=4).map(tuple))


@settings(deadline=None)
@given(meshes(), AXIS_SETS)
def test_groups_partition_the_world(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    assert {len(group) for group in groups} == {mesh.size(axis)}
    assert all(list(group) == sorted(group) for group in groups)
    assert list(groups) == sorted(groups)
    for group in groups:
        assert all(mesh.peers(rank, axis) == group for rank in group)


@settings(deadline=None)
@given(meshes(), AXIS_SETS)
def test_a_group_differs_on_its_axes_only(mesh, axis):
    names = {axis} if isinstance(axis, str) else set(axis)
    names |= {"replica", "shard"} if "dp" in names else set()
    names |= {"dp"} if names & {"replica", "shard"} else set()
    for group in mesh.groups(axis):
        places = [mesh.coordinates(rank) for rank in group]
        assert all(place[other] == places[0][other] for place in places for other in set(AXES) - names)


@settings(deadline=None)
@given(meshes())
def test_coordinates_are_a_bijection(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]
    assert len({tuple(sorted(place.items())) for place in places}) == mesh.world
    for rank, place in enumerate(places):
        assert place["dp"] == place["replica"] * mesh.axes["shard"] + place["shard"]
        assert mesh.rank(**{axis: place[axis] for axis in mesh.axes}) == rank
        assert mesh.rank(**{axis: place[axis] for axis in ("pp", "dp", "cp", "tp")}) == rank
        assert all(place[axis] < size for axis, size in mesh.axes.items())


def test_the_drawing_in_the_note():
    layout = Layout(dp=4, shard=2, tp=2, pp=2)
    mesh = Mesh(layout)
    assert list(mesh.axes.items()) == [("pp", 2), ("replica", 2), ("shard", 2), ("cp", 1), ("tp", 2)]
    assert mesh.peers(5, "tp") == (4, 5)
    assert mesh.peers(5, "shard") == (5, 7)
    assert mesh.peers(5, "replica") == (1, 5)
    assert mesh.peers(5, "dp") == (1, 3, 5, 7)
    assert mesh.peers(5, "pp") == (5, 13)
    assert mesh.peers(5, ("shard", "tp")) == mesh.peers(5, ("tp", "shard")) == (4, 5, 6, 7)
    assert Mesh(layout, ("dp", "pp")).peers(5, "pp") == (5, 7)


def test_without_sharding_every_dp_rank_is_a_replica():
    assert Mesh(Layout(dp=4)).axes == {"pp": 1, "replica": 4, "shard": 1, "cp": 1, "tp": 1}
    assert Mesh(Layout(dp=4, zero=1)).axes == {"pp": 1, "replica": 1, "shard": 4, "cp": 1, "tp": 1}


def test_a_grid_of_tp_is_made_of_axes():
    mesh = Mesh(Layout(dp=2, tp=8, tp_kind="2.5d", depth=2))
    assert mesh.axes == {"pp": 1, "replica": 2, "shard": 1, "cp": 1, "z": 2, "y": 2, "x": 2}
    assert mesh.peers(13, "x") == (12, 13)
    assert mesh.peers(13, "y") == (13, 15)
    assert mesh.peers(13, "z") == (9, 13)
    assert mesh.peers(13, "tp") == tuple(range(8, 16))
    assert mesh.coordinates(13)["tp"] == 5
    assert mesh.rank(dp=1, tp=5) == 13
    with pytest.raises(ValueError, match="by tp or by z and y and x"):
        mesh.rank(tp=5, x=1)


def test_heads_are_exchanged_between_neighbours_of_cp():
    mesh = Mesh(Layout(cp=4, cp_kind="ring-ulysses", ulysses=2, tp=2))
    assert mesh.peers(5, "ulysses") == (5, 7)
    assert mesh.peers(5, "ring") == (1, 5)
    assert mesh.peers(5, "cp") == (1, 3, 5, 7)
    assert mesh.coordinates(5) == {
        "pp": 0,
        "replica": 0,
        "shard": 0,
        "dp": 0,
        "ring": 1,
        "ulysses": 0,
        "cp": 2,
        "tp": 1,
        "ereplica": 5,
        "eshard": 0,
        "edp": 5,
        "ep": 0,
        "etp": 0,
    }


def test_expert_axes_fold_into_the_ranks_of_a_stage():
    mesh = Mesh(Layout(dp=2, cp=2, tp=2, pp=2, ep=2, etp=2))
    assert mesh.expert_axis_sizes == {"ereplica": 1, "eshard": 2, "ep": 2, "etp": 2}
    assert mesh.groups("etp")[:2] == ((0, 1), (2, 3))
    assert mesh.groups("ep")[:2] == ((0, 2), (1, 3))
    assert mesh.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert mesh.groups(("ep", "etp")) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert [mesh.coordinates(14)[name] for name in ("edp", "ep", "etp")] == [1, 1, 0]


@pytest.mark.parametrize(
    ("layout", "shards", "replicas"),
    [
        ("dp=8,shard=4,ep=2", ((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("dp=8,shard=4,ep=2,etp=2", tuple((rank,) for rank in range(8)), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("dp=8,shard=2,ep=4", tuple((rank,) for rank in range(8)), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("dp=4,shard=2,tp=2,ep=2", ((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("dp=4,zero=1,ep=2", ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))),
    ],
)
def test_copies_of_experts_are_sharded_inside_hsdp_groups(layout, shards, replicas):
    mesh = Mesh(Layout.parse(layout))
    assert mesh.groups("eshard") == shards
    assert mesh.groups("ereplica") == replicas


def test_tp_is_innermost_and_cp_is_next():
    mesh = Mesh(Layout(dp=2, tp=2, cp=2), ("dp", "pp"))
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("pp") == tuple((rank,) for rank in range(8))


def test_a_mesh_is_a_value():
    assert Mesh(Layout(dp=2)) == Mesh(Layout.parse("dp=2"))
    assert len({Mesh(Layout(dp=2)), Mesh(Layout(dp=2)), Mesh(Layout(tp=2))}) == 2


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda mesh: mesh.groups("tensor_parallel"), 'did you mean "tp"'),
        (lambda mesh: mesh.groups("banana"), "use one of pp, replica"),
        (lambda mesh: mesh.coordinates(8), "rank=8, world=8"),
        (lambda mesh: mesh.peers(-1, "tp"), "rank=-1"),
        (lambda mesh: mesh.rank(tp=2), "no position 2"),
        (lambda mesh: mesh.rank(dp=1, shard=1), "not by both"),
        (lambda mesh: Mesh(mesh.layout, ("tp", "dp")), "pp and dp once each"),
        (lambda mesh: Mesh(Layout(dp=4, zero=1, shard=3)), "shard=3, dp=4"),
    ],
)
def test_errors_of_a_mesh(ask, words):
    with pytest.raises(ValueError, match=words):
        ask(Mesh(Layout(dp=4, tp=2)))
