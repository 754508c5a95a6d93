"""The index of a checkpoint with right digests and wrong contents is refused with one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_inputs import write_index

from echelon.checkpoint.checkpoint_index import CheckpointError, CheckpointIndex, FileRecord, StoredSlice, TensorRecord
from echelon.checkpoint.load import open_index
from echelon.checkpoint.storage import LocalStorage

SLICES = tuple(StoredSlice("part", 4096 + 4 * row * 3, ((row, row + 1), (0, 3)), (row, 1)) for row in range(2))
INDEX = CheckpointIndex(
    step=2,
    metadata={"config": "steps = 2", "skipped_batches": [3]},
    files={"part": FileRecord(5000, "abc")},
    tensors={"w": TensorRecord("F32", (2, 3), SLICES)},
    hash="0",
)
DELETED = object()


def changed(place: str, value: Any) -> str:
    tree = node = json.loads(INDEX.to_json())
    *parents, last = place.split("/")
    for key in parents:
        node = node[int(key) if isinstance(node, list) else key]
    key = int(last) if isinstance(node, list) else last
    node[key] = value
    if value is DELETED:
        del node[key]
    return json.dumps(tree)


def open_text(folder: Path, text: str) -> CheckpointIndex:
    place = folder / "step-00000002"
    place.mkdir()
    write_index(place, text)
    return open_index(LocalStorage(folder), 2)


def test_a_valid_index_is_read_back(tmp_path: Path) -> None:
    assert open_text(tmp_path, INDEX.to_json()) == INDEX


SLICE = "tensors/w/slices/0"
WRONG = {
    **{text: text for text in ("[]", "null", '"text"', "7", "[" * 100_000 + "]" * 100_000, "9" * 10_000, "{}", "{")},
    **{f"without {key}": changed(key, DELETED) for key in ("format", "step", "hash", "facts", "files", "tensors")},
    **{f"step {value}": changed("step", value) for value in (float("nan"), -1, 2.0, "2", None, True, 3)},
    "facts of another type": changed("facts", []),
    "size as text": changed("files/part/bytes", "5000"),
    "unknown dtype": changed("tensors/w/dtype", "F31"),
    "shape as text": changed("tensors/w/shape", "23"),
    "negative size": changed("tensors/w/shape/0", -2),
    "larger shape": changed("tensors/w/shape/0", 3),
    **{f"offset {value}": changed(f"{SLICE}/at", value) for value in ("4096", 4096.0, -1, 10**9, None)},
    "box beyond the shape": changed(f"{SLICE}/box/1/1", 4),
    "box of one range": changed(f"{SLICE}/box", [[0, 1]]),
    "box of numbers": changed(f"{SLICE}/box", [0, 1]),
    "the same box twice": changed(f"{SLICE}/box", [[1, 2], [0, 3]]),
    "one sum": changed(f"{SLICE}/sums", ["00"]),
    "sums without digits": changed(f"{SLICE}/sums", ["x", "y"]),
    "unknown file": changed(f"{SLICE}/file", "other"),
}


@pytest.mark.parametrize("name", WRONG, ids=lambda name: name[:30])
def test_a_wrong_index_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000002.*use another checkpoint") as info:
        open_text(tmp_path, WRONG[name])
    assert "\n" not in str(info.value)


def test_a_file_outside_of_the_directory_is_refused(tmp_path: Path) -> None:
    tree = json.loads(INDEX.to_json())
    tree["files"]["../../secret"] = {"bytes": 1, "header": ""}
    with pytest.raises(CheckpointError, match=r"outside of the directory: \.\./\.\./secret"):
        open_text(tmp_path, json.dumps(tree))


def test_facts_have_their_types() -> None:
    assert INDEX.fact("skipped_batches", list, []) == [3]
    assert INDEX.fact("spikes", dict, {}) == {}
    with pytest.raises(CheckpointError, match=r"facts\.config is not a list"):
        INDEX.fact("config", list, [])
    with pytest.raises(CheckpointError, match=r"facts\.samples is not an integer"):
        replace(INDEX, metadata={"samples": True}).fact("samples", int, 0)


def test_a_slice_outside_of_its_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"w \(a slice is not inside \[2, 3\]\)"):
        open_text(tmp_path, WRONG["box beyond the shape"])


def test_columns_of_a_wide_tensor_are_compared_quickly(tmp_path: Path) -> None:
    """All boxes share their rows: sorted by rows, each was compared with every other."""
    count = 20_000
    slices = tuple(StoredSlice("part", column, ((0, 1), (column, column + 1)), (0, 0)) for column in range(count))
    tensor = TensorRecord("U8", (1, count), slices)
    index = CheckpointIndex(2, {}, {"part": FileRecord(count, "")}, {"w": tensor})
    assert open_text(tmp_path, index.to_json()) == index
