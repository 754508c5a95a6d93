"""Loads of experts over a run, read from its log in bounded room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from expert_log_records import record, records

from echelon.report.expert_load_history import ExpertLoadHistory
from echelon.training.run.run_dir import RunError


def test_columns_are_steps_until_they_are_full() -> None:
    few = ExpertLoadHistory.from_records(records(steps=7, layers=2), max_columns=8)
    assert few.spans == [(step, step) for step in range(1, 8)]
    many = ExpertLoadHistory.from_records(records(steps=61, layers=2), max_columns=8)
    assert many.spans == [(first, min(first + 7, 61)) for first in range(1, 62, 8)]
    assert [column.steps for column in many.layers[0].columns] == [8] * 7 + [5]
    assert many.heading() == "2 layers of 4 experts, steps 1 to 61, 8 to a column"
    assert len(many.downsample(2).spans) == 2


def test_nothing_is_lost_in_columns() -> None:
    """Every assignment and every drop is in one column; figures are means over steps."""
    reported = records(steps=50, layers=1)
    layer = ExpertLoadHistory.from_records(reported, max_columns=8).layers[0]
    lines = [line["layers"][0] for line in reported]
    total = layer.merged_column()
    assert total.dropped == sum(line["dropped"] for line in lines)
    assert total.counts == [sum(column) for column in zip(*(line["counts"] for line in lines), strict=True)]
    assert total.mean_figures["max/mean"] == pytest.approx(sum(line["most"] for line in lines) / 50)
    assert total.mean_figures["dropped %"] == pytest.approx(100 * total.dropped / total.assigned)
    assert layer.worst_max_over_mean == max(line["most"] for line in lines) == lines[layer.worst_step - 1]["most"]
    assert sum(layer.columns[0].relative_loads) == pytest.approx(4)


def test_steps_without_counts_have_figures() -> None:
    """Long runs log the counts of some steps only; the last steps of one may have none."""
    reported = records(steps=10, layers=1)
    for line in reported:
        if line["step"] not in (1, 4):
            del line["layers"][0]["counts"]
    layer = ExpertLoadHistory.from_records(reported, max_columns=4).layers[0]
    assert [column.steps for column in layer.columns] == [4, 6]
    assert layer.merged_column().counts == [
        a + b for a, b in zip(*(reported[at]["layers"][0]["counts"] for at in (0, 3)), strict=True)
    ]
    assert layer.merged_column().assigned == sum(line["layers"][0]["assigned"] for line in reported)


def test_unused_experts_are_listed() -> None:
    history = ExpertLoadHistory.from_records(
        [record(step, [[5, 0, 3, 0]], [0]) for step in (1, 2)] + [record(3, [[5, 0, 3, 1]], [2])]
    )
    assert history.layers[0].unused_experts() == [1]
    (layer,) = history.to_json()["layers"]
    assert (layer["never"], layer["dead"], layer["dropped"], layer["dropped_in_run"]) == ([1], 1, 2, 2)
    assert (layer["assigned_in_run"], layer["worst"], layer["worst_step"]) == (25, 2.5, 1)


def test_the_worst_layers_are_those_that_stay_unbalanced() -> None:
    """Routers are uneven at first; what counts is the second half."""
    early, late, even = [[90, 10]] * 5 + [[50, 50]] * 5, [[60, 40]] * 5 + [[70, 30]] * 5, [[50, 50]] * 10
    reported = [record(step + 1, [list(one[step]) for one in (early, late, even)], [0] * 3) for step in range(10)]
    assert [layer.name for layer in ExpertLoadHistory.from_records(reported).worst_layers(1)] == ["blocks.1.mlp"]


def test_the_late_max_over_mean_is_a_mean_over_steps() -> None:
    """Columns of several steps, the last one of fewer."""
    reported = records(steps=13, layers=1)
    layer = ExpertLoadHistory.from_records(reported, max_columns=4).layers[0]
    assert [column.steps for column in layer.columns] == [4, 4, 4, 1]
    late = [line["layers"][0]["most"] for line in reported[8:]]
    assert layer.late_max_over_mean() == pytest.approx(sum(late) / len(late))


def logged(folder: Path, lines: list[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_a_killed_run_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    reported = records(steps=3, layers=1)
    history = ExpertLoadHistory.read(logged(tmp_path / "run", reported, json.dumps(reported[0])[:50]))
    assert (history.name, history.steps) == ("run", (1, 3))


def test_missing_and_unreadable_logs(tmp_path: Path) -> None:
    assert not ExpertLoadHistory.read(tmp_path).layers
    assert not ExpertLoadHistory.read(logged(tmp_path, [{"kind": "step", "step": 1}])).layers
    assert not ExpertLoadHistory.read(logged(tmp_path, [], '{"kind": "exp')).layers
    one = records(steps=1, layers=1)
    for wrong in ({"kind": "experts", "step": 2}, {"kind": "experts", "step": 2, "layers": []}):
        with pytest.raises(RunError, match="expert loads cannot be read"):
            ExpertLoadHistory.read(logged(tmp_path, [*one, wrong]))
    # Reported twice is counted once.
    assert ExpertLoadHistory.read(logged(tmp_path, [*one, *one])).layers[0].merged_column().steps == 1
