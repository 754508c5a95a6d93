"""The placement record: over any cuts and shards, every element of every parameter is owned exactly once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.layout import Layout, Mesh
from echelon.layout.placement import DimSplit, LogicalParam, ParamGroupSpec, Piece, Placement, group_params

PADDING = -1


def entry(
    name: str, *shape: int, cuts: tuple[DimSplit, ...] = (), decay: bool = True, trainable: bool = True
) -> LogicalParam:
    return LogicalParam(name=name, names=(name,), shape=shape, splits=cuts, decay=decay, trainable=trainable)


def local_indices(entry: LogicalParam, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The local tensor of a rank, each element its flat index in the logical tensor, padding -1. Flat."""
    whole = np.arange(int(np.prod(entry.shape, dtype=int))).reshape(entry.shape)
    part = whole[tuple(slice(low, high) for low, high in box)]
    padded = np.full(entry.local_shape, PADDING)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded.reshape(-1)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[LogicalParam, ...], dict[str, int]]:
    """Entries with random cuts, two of one dimension too, and the sizes of the axes."""
    sizes = {
        "x": draw(st.sampled_from([1, 2, 3, 4])),
        "y": draw(st.sampled_from([1, 2])),
        "shard": draw(st.integers(1, 5)),
        "replica": draw(st.integers(1, 2)),
    }
    entries, trainable = [], draw(st.booleans())
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        axes = draw(st.permutations(["x", "y"]))
        dims = [draw(st.integers(0, len(shape) - 1)) for _ in axes] if shape else []
        cuts = []
        for axis, dim in list(zip(axes, dims, strict=False))[: draw(st.integers(0, 2))]:
            copies = draw(st.sampled_from([c for c in range(1, sizes[axis] + 1) if sizes[axis] % c == 0]))
            cuts.append(DimSplit(axis=axis, dim=dim, num_parts=sizes[axis] // copies, num_copies=copies))
        entries.append(entry(f"p{index}", *shape, cuts=tuple(cuts), decay=draw(st.booleans()), trainable=trainable))
    return tuple(entries), sizes


def placements(entries: tuple[LogicalParam, ...], sizes: dict[str, int]) -> list[Placement]:
    """One for every rank."""
    unit = ParamGroupSpec(name="", params=entries, num_shards=sizes["shard"])
    ranks = [dict(zip(sizes, place, strict=True)) for place in product(*(range(size) for size in sizes.values()))]
    return [Placement(param_groups=(unit,), coordinates={"pp": 0, "cp": 0, **at}) for at in ranks]


@settings(deadline=None)
@given(worlds())
def test_every_element_is_owned_once_in_each_replica(world: tuple[tuple[LogicalParam, ...], dict[str, int]]) -> None:
    entries, sizes = world
    owners = {
        (e.name, replica): np.zeros(int(np.prod(e.shape, dtype=int)), dtype=int)
        for e in entries
        for replica in range(sizes["replica"])
    }
    for placement in placements(entries, sizes):
        for piece in placement.pieces():
            held = local_indices(piece.param, piece.box)
            for start, stop in piece.unpadded_runs() if piece.is_owner else ():
                assert (held[start:stop] != PADDING).all()
                np.add.at(owners[piece.param.name, placement.coordinates["replica"]], held[start:stop], 1)
    for (name, replica), times in owners.items():
        assert (times == 1).all(), (name, replica, times)


@settings(deadline=None)
@given(worlds())
def test_owned_pieces_of_shards_rebuild_a_tensor(
    world: tuple[tuple[LogicalParam, ...], dict[str, int]],
) -> None:
    """Through the shards themselves: flat buffers as ranks hold them, and nothing but the record to read them by."""
    entries, sizes = world
    found = {e.name: np.full(int(np.prod(e.shape, dtype=int)), PADDING) for e in entries}
    for placement in placements(entries, sizes):
        if placement.coordinates["replica"] != 0:
            continue
        unit = placement.param_groups[0]
        buffer = np.full(unit.num_shards * unit.shard_numel, PADDING)
        for e in unit.params:
            start = unit.offsets[e.name]
            buffer[start : start + e.local_numel] = local_indices(e, e.box(placement.coordinates))
        shard = buffer.reshape(unit.num_shards, -1)[placement.coordinates["shard"]]
        for piece in placement.pieces():
            values = shard[piece.shard_offset : piece.shard_offset + piece.stop - piece.start]
            assert len(values) == piece.stop - piece.start
            for start, stop in piece.unpadded_runs() if piece.is_owner else ():
                run = values[start - piece.start : stop - piece.start]
                found[piece.param.name][run] = run
    for name, values in found.items():
        assert (values == np.arange(len(values))).all(), name


@settings(deadline=None)
@given(worlds())
def test_unpadded_runs_are_in_order(
    world: tuple[tuple[LogicalParam, ...], dict[str, int]],
) -> None:
    for placement in placements(*world):
        for piece in placement.pieces():
            real = [i for i in range(piece.start, piece.stop) if local_indices(piece.param, piece.box)[i] != PADDING]
            runs = list(piece.unpadded_runs())
            assert [i for start, stop in runs for i in range(start, stop)] == real
            assert all(start < stop for start, stop in runs)


@settings(deadline=None)
@given(worlds())
def test_the_shards_of_a_buffer_are_equal_and_cover_it(world: tuple[tuple[LogicalParam, ...], dict[str, int]]) -> None:
    entries, sizes = world
    unit = ParamGroupSpec(name="", params=entries, num_shards=sizes["shard"])
    assert 0 <= unit.num_shards * unit.shard_numel - unit.numel < unit.num_shards
    for e in unit.params:
        edges = [unit.shard_interval(e, shard) for shard in range(unit.num_shards)]
        covered = [i for start, stop in edges for i in range(start, stop)]
        assert covered == list(range(e.local_numel))


def piece_of(e: LogicalParam, at: dict[str, int], shards: int = 1) -> Piece:
    unit = ParamGroupSpec(name="", params=(e,), num_shards=shards)
    return Placement(param_groups=(unit,), coordinates={"shard": 0, "replica": 0, "cp": 0, "pp": 0, **at}).piece(
        unit, e
    )


@pytest.mark.parametrize(
    ("tp", "box", "runs"),
    [
        (0, ((0, 3), (0, 2)), [(0, 6)]),
        (1, ((0, 3), (2, 4)), [(0, 6)]),
        # 5 columns in three parts of two: the last part has one real column in each row
        (2, ((0, 3), (4, 5)), [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_padding_of_an_inner_dimension(tp: int, box: tuple[tuple[int, int], ...], runs: list[tuple[int, int]]) -> None:
    piece = piece_of(entry("w", 3, 5, cuts=(DimSplit(axis="tp", dim=1, num_parts=3),)), {"tp": tp})
    assert piece.box == box
    assert list(piece.unpadded_runs()) == runs


def test_a_part_may_be_all_padding() -> None:
    piece = piece_of(entry("w", 5, 2, cuts=(DimSplit(axis="tp", dim=0, num_parts=4),)), {"tp": 3})
    assert piece.box == ((5, 5), (0, 2))
    assert (piece.start, piece.stop) == (0, 4)
    assert list(piece.unpadded_runs()) == []


def test_the_first_replica_owns() -> None:
    heads = entry("k", 4, cuts=(DimSplit(axis="tp", dim=0, num_parts=2, num_copies=2),))
    assert [piece_of(heads, {"tp": tp}).is_owner for tp in range(4)] == [True, False, True, False]
    assert [piece_of(entry("norm", 4), {"tp": tp}).is_owner for tp in range(4)] == [True, False, False, False]


def test_coordinates_of_a_mesh_fit_the_record() -> None:
    mesh = Mesh(Layout.parse("dp=4,shard=2,tp=2"))
    unit = ParamGroupSpec(
        name="", params=(entry("w", 6, 3, cuts=(DimSplit(axis="tp", dim=0, num_parts=2),)),), num_shards=2
    )
    owned = 0
    for rank in range(mesh.world):
        placement = Placement(param_groups=(unit,), coordinates=mesh.coordinates(rank))
        if placement.coordinates["replica"] == 0:
            owned += sum(stop - start for piece in placement.pieces() for start, stop in piece.unpadded_runs())
    assert owned == 18


# -- units ------------------------------------------------------------------------------------------------------------


def tied(*names: str) -> LogicalParam:
    return LogicalParam(name=names[0], names=names, shape=(2, 2))


def test_params_join_the_group_of_their_module() -> None:
    entries = [entry("embed.weight", 2), entry("blocks.1.w", 2), entry("blocks.10.w", 2), entry("blocks.1.b", 2)]
    units = group_params(entries, dict.fromkeys(["blocks.1", "blocks.10"], False), 2)
    assert {unit.name: [e.name for e in unit.params] for unit in units} == {
        "": ["embed.weight"],
        "blocks.1": ["blocks.1.w", "blocks.1.b"],
        "blocks.10": ["blocks.10.w"],
    }
    assert all(unit.num_shards == 2 for unit in units)


def test_weights_tied_across_groups_join_the_root() -> None:
    entries = [tied("embed.weight", "head.weight"), tied("a.w", "b.w"), tied("a.x", "a.y")]
    units = group_params(entries, dict.fromkeys(["a", "b", "embed", "head"], False), 1)
    assert {unit.name: [e.name for e in unit.params] for unit in units} == {"": ["embed.weight", "a.w"], "a": ["a.x"]}


def test_no_param_group_is_empty_and_the_root_is_first() -> None:
    units = group_params(
        [entry("b.w", 2), entry("a.w", 2), entry("c", 2)], dict.fromkeys(["a", "empty", "b"], False), 1
    )
    assert [unit.name for unit in units] == ["", "a", "b"]
    assert [unit.name for unit in group_params([entry("a.w", 2)], dict.fromkeys(["a"], False), 1)] == ["a"]


def test_the_root_group_and_chosen_groups_stay_unsharded() -> None:
    units = group_params([entry("embed.w", 2), entry("a.w", 2), entry("c", 2)], {"embed": True, "a": False}, 1)
    assert {unit.name: unit.stays_unsharded for unit in units} == {"": True, "embed": True, "a": False}


def test_experts_form_groups_that_are_freed_after_use() -> None:
    """All experts of a model, unsharded at once, would take the memory that zero=3 saves."""
    experts = [replace(entry(f"a.experts.{name}", 2), is_expert=True) for name in ("up", "down")]
    units = group_params([entry("a.norm", 2), entry("c", 2), *experts], {"a": False}, 4, 2)
    assert {unit.name: (unit.num_shards, unit.stays_unsharded) for unit in units} == {
        "": (4, True),
        "a": (4, False),
        "a.experts": (2, False),
    }


def test_a_buffer_holds_decayed_then_plain() -> None:
    params = (entry("bias", 3, decay=False), entry("weight", 2, 2), entry("other", 5))
    unit = ParamGroupSpec(name="", params=params, num_shards=3)
    assert unit.offsets == {"weight": 0, "other": 4, "bias": 9}
    assert (unit.numel, unit.shard_numel) == (12, 4)


@pytest.mark.parametrize(("shard_frozen", "shards"), [(False, 1), (True, 4)])
def test_frozen_parameters_form_groups_beside_the_trainable_ones(shard_frozen: bool, shards: int) -> None:
    """In one buffer with them, frozen parameters would have gradients and master weights, and be reduced."""
    params = [entry("a.w", 8, trainable=False), entry("a.lora", 2), entry("embed", 4, trainable=False)]
    units = group_params(params, {"a": False}, 4, shard_frozen=shard_frozen)
    assert [(unit.name, unit.module, unit.num_shards) for unit in units] == [
        (" (frozen)", "", shards),
        ("a", "a", 4),
        ("a (frozen)", "a", shards),
    ]


def test_one_of_the_ranks_that_shard_other_groups_writes_a_frozen_one() -> None:
    frozen = group_params([entry("w", 8, trainable=False)], {}, 2)
    writers = [
        Placement(param_groups=frozen, coordinates={"shard": shard, "replica": replica, "cp": 0, "pp": 0})
        .piece(frozen[0], frozen[0].params[0])
        .is_first_replica
        for shard in range(2)
        for replica in range(2)
    ]
    assert writers == [True, False, False, False]
