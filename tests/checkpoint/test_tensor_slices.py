"""Boxes of logical tensors: every element once, however two placements shard it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from echelon.checkpoint.checkpoint_index import (
    CheckpointIndex,
    FileRecord,
    FileRegion,
    StoredSlice,
    TensorRecord,
    any_overlap,
    safetensors_header,
)
from echelon.checkpoint.checksums import add_checksums, box_checksum, state_hash
from echelon.checkpoint.tensor_slices import LocalSlice, box_shape, contiguous_rows, intersect, numel
from echelon.layout.placement import DimSplit, LogicalParam, ParamGroupSpec, Placement


def random_placements(source: random.Random) -> list[Placement]:
    """Tensors sharded over tp (with padding and replicas), ep, stages and dp, on up to 8 ranks."""
    tp, shards, pp = source.choice(
        [(1, 1, 1), (1, 3, 1), (2, 1, 2), (2, 2, 1), (2, 4, 1), (4, 1, 2), (4, 2, 1), (1, 8, 1), (3, 2, 1), (1, 2, 3)]
    )
    entries = []
    for number, shape in enumerate(SHAPES):
        cuts: tuple[DimSplit, ...] = ()
        if tp > 1 and source.random() < 0.8:
            copies = 2 if tp == 4 and source.random() < 0.3 else 1
            cuts = (DimSplit(axis="tp", dim=source.randrange(len(shape)), num_parts=tp // copies, num_copies=copies),)
        # the last one is tied: every stage holds it
        holders = tuple(range(pp)) if number == len(SHAPES) - 1 and pp > 1 else ()
        named = {"name": f"p{number}", "names": (f"p{number}",)}
        entries.append(LogicalParam(**named, shape=shape, splits=cuts, decay=len(shape) > 1, tied_pp_ranks=holders))
    replicas = 8 // (tp * shards * pp)
    inside = replicas * shards * tp
    ep = source.choice([size for size in (1, 2, 4) if inside % size == 0])
    cut = (DimSplit(axis="ep", dim=0, num_parts=ep),) if ep > 1 else ()
    expert = LogicalParam(name="expert", names=("expert",), shape=EXPERT, splits=cut, is_expert=True)
    folded_shards = source.choice([1, inside // ep])
    found = []
    for rank in range(inside * pp):
        stage, at = divmod(rank, inside)
        rest, t = divmod(at, tp)
        replica, shard = divmod(rest, shards)
        edp = at // ep
        one = (
            {"expert shard": edp, "expert replica": 0}
            if folded_shards > 1
            else {"expert shard": 0, "expert replica": edp}
        )
        place = {"tp": t, "shard": shard, "replica": replica, "pp": stage, "ep": at % ep, "etp": 0, **one}
        mine = tuple(e for number, e in enumerate(entries) if e.tied_pp_ranks or number % pp == stage)
        units = [ParamGroupSpec(name="", params=mine, num_shards=shards)]
        if stage == pp - 1:
            units.append(ParamGroupSpec(name="expert", params=(expert,), num_shards=folded_shards))
        found.append(Placement(param_groups=tuple(units), coordinates=place))
    return found


EXPERT = (4, 3, 2)
SHAPES = [(7, 5), (9,), (4, 3, 5), (11, 2)]


def writes(placement: Placement) -> dict[str, list[tuple[tuple[int, int], ...]]]:
    return {
        piece.param.name: [placed.box for placed in LocalSlice.from_piece(piece).boxes()]
        for piece in placement.pieces()
        if piece.is_owner and piece.is_first_replica
    }


@pytest.mark.parametrize("seed", range(150))
def test_any_layout_reads_what_any_layout_wrote(seed: int) -> None:
    """Written by one placement and read by another, in NumPy alone: equal elements, and no byte more than is held."""
    source = random.Random(seed)
    truth = {f"p{n}": np.arange(np.prod(shape)).reshape(shape) for n, shape in enumerate(SHAPES)}
    truth["expert"] = np.arange(np.prod(EXPERT)).reshape(EXPERT)
    writers, readers = random_placements(source), random_placements(source)
    disk: dict[str, list[tuple[tuple[tuple[int, int], ...], np.ndarray]]] = {name: [] for name in truth}
    for placement in writers:
        for name, boxes in writes(placement).items():
            disk[name] += [(box, truth[name][tuple(slice(*r) for r in box)].reshape(-1)) for box in boxes]
    for name, stored in disk.items():
        assert sum(numel(box) for box, _ in stored) == truth[name].size
        assert not any_overlap([box for box, _ in stored])
    for placement in readers:
        held = read = 0
        for piece in placement.pieces():
            name, part = piece.param.name, LocalSlice.from_piece(piece)
            run = np.full(part.stop - part.start, -1)
            for placed in part.boxes():
                held += numel(placed.box)
                for box, values in disk[name]:
                    if (shared := intersect(placed.box, box)) is None:
                        continue
                    rows = contiguous_rows(shared, box)
                    found = np.concatenate([values[at : at + rows.length] for at in rows.starts])
                    read += len(found)
                    mine = placed.sub_box(shared)
                    view = np.lib.stride_tricks.as_strided(
                        run[mine.offset :], box_shape(shared), [stride * run.itemsize for stride in mine.strides]
                    )
                    view[...] = found.reshape(box_shape(shared))
            local = np.full(piece.param.local_shape, -1)
            logical = truth[name][tuple(slice(*r) for r in piece.box)]
            local[tuple(slice(0, size) for size in logical.shape)] = logical
            np.testing.assert_array_equal(run, local.reshape(-1)[piece.start : piece.stop])
        assert read == held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
@pytest.mark.parametrize("seed", range(6))
def test_checksums_do_not_depend_on_the_sharding(seed: int, dtype: torch.dtype) -> None:
    source = random.Random(seed)
    shape = source.choice([(5000, 3), (7, 4099), (64, 128), (3, 50, 40), (20011,)])
    whole = torch.randint(0, 1 << 8, shape, generator=torch.Generator().manual_seed(seed)).mul(37).to(dtype)
    everything = box_checksum(whole, tuple((0, size) for size in shape), shape)
    size, starts = whole.numel(), sorted(source.sample(range(1, whole.numel()), 3))
    parts = []
    for start, stop in zip([0, *starts], [*starts, size], strict=True):
        for placed in LocalSlice(shape, tuple((0, side) for side in shape), start, stop).boxes():
            values = whole[tuple(slice(*r) for r in placed.box)].contiguous()
            parts.append(box_checksum(values, placed.box, shape))
    assert add_checksums(parts) == everything
    cut = shape[-1] // 2
    halves = [(whole[..., :cut], (0, cut)), (whole[..., cut:], (cut, shape[-1]))]
    outer = tuple((0, side) for side in shape[:-1])
    assert add_checksums([box_checksum(v.contiguous(), (*outer, r), shape) for v, r in halves]) == everything
    changed = whole.clone()
    changed.view(torch.uint8).view(-1)[source.randrange(size)] ^= 1 << source.randrange(8)
    assert box_checksum(changed, tuple((0, side) for side in shape), shape) != everything
    swapped = whole.clone()
    swapped.view(-1)[:2] = whole.view(-1)[:2].flip(0)
    if not torch.equal(swapped, whole):
        assert box_checksum(swapped, tuple((0, side) for side in shape), shape) != everything
    assert state_hash({"a": everything}) != state_hash({"b": everything})


def test_a_scalar_is_a_box_too() -> None:
    part = LocalSlice.full(())
    assert [placed.box for placed in part.boxes()] == [()]
    assert numel(()) == 1
    assert contiguous_rows((), ()).starts == (0,)


def test_the_index_round_trips_and_reports_missing_elements() -> None:
    stored = StoredSlice("part-00000.safetensors", 64, ((0, 2), (0, 3)), (1, (1 << 64) - 1))
    index = CheckpointIndex(
        3,
        {"seed": 1},
        {"part-00000.safetensors": FileRecord(64 + 24, "x")},
        {"a": TensorRecord("F32", (2, 3), (stored,))},
    )
    assert CheckpointIndex.from_json(index.to_json()) == index
    index.check_complete()
    short = CheckpointIndex(3, {}, index.files, {"a": TensorRecord("F32", (4, 3), (stored,))})
    with pytest.raises(ValueError, match=r"a \(6 of 12 elements\)"):
        short.check_complete()


def test_an_element_that_is_stored_twice_does_not_stand_for_one_that_is_missing() -> None:
    """As many elements as the tensor has, and two ranks that wrote the same rows."""
    twice = [StoredSlice("part-00000.safetensors", 64 + 24 * n, ((0, 2), (0, 3)), (0, 0)) for n in range(2)]
    files = {"part-00000.safetensors": FileRecord(64 + 48, "x")}
    index = CheckpointIndex(3, {}, files, {"a": TensorRecord("F32", (4, 3), tuple(twice))})
    with pytest.raises(ValueError, match="does not store every element exactly once"):
        index.check_complete()


def test_headers_are_what_safetensors_reads(tmp_path) -> None:
    from safetensors import safe_open

    regions = [FileRegion("a", "F32", (2, 3), ((0, 2), (1, 3)), 0), FileRegion("b", "I64", (), (), 16)]
    header = safetensors_header(regions)
    assert len(header) % 64 == 0
    file = tmp_path / "x.safetensors"
    file.write_bytes(header + np.arange(4, dtype=np.float32).tobytes() + np.int64(7).tobytes())
    with safe_open(file, "np") as opened:
        assert set(opened.keys()) == {"a[0:2,1:3]", "b"}
        assert opened.get_tensor("b") == 7
