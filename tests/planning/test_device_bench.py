"""`echelon bench` on this machine's CPU: small sizes, on the warm ranks of the pool."""

from __future__ import annotations

import contextlib
import json

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.planning.calibrate.calibration import calibrate
from echelon.planning.cluster import device_bench
from echelon.planning.cluster.cluster import MeasuredCurves, local_cluster, parse_cluster
from echelon.planning.cluster.device_bench import (
    DeviceMeasurement,
    bench_steps,
    format_size,
    time_collective,
    to_curves,
    with_curves,
)
from echelon.planning.cluster.link_time import COLLECTIVES, fit_link

SMALL = {
    "MATMUL_SHAPES": {"cpu": ((32, 32, 32), (64, 128, 64), (256, 256, 256))},
    "ATTENTION_SHAPES": {"cpu": ((64, 32),)},
    "STREAM_BYTES": {"cpu": 4 << 20},
    "MESSAGE_SIZES": (64 << 10, 1 << 20),
}


@pytest.fixture
def small(monkeypatch, pool):
    """Two CPU cores, whatever this worker is pinned to and whatever GPU there is, and measurements of milliseconds."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in SMALL.items():
        monkeypatch.setattr(device_bench, name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("echelon.launch.rank_pool.RankPool", lambda **_: contextlib.nullcontext(pool))


def test_a_quick_run_writes_a_cluster_that_plans_read(small, tmp_path):
    path = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["bench", "--only", "devices", "--quick", "--json", "--out", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"rows", "left_out", "devices", "curves"}
    assert found["rows"] == []
    assert {row["what"] for row in found["devices"]} == {"matmul", "attention", "memory", *COLLECTIVES}
    assert all(row["seconds"] > 0 and row["rate"] > 0 for row in found["devices"])
    cluster = parse_cluster(str(path))
    assert cluster.name == "mine"
    assert cluster.devices == 2
    assert cluster.curves is not None
    assert json.loads(json.dumps(found["curves"]["matmul"])) == [list(row) for row in cluster.curves.matmul]
    assert calibrate(cluster) != calibrate(local_cluster())
    planned = CliRunner().invoke(app, ["plan", "gpt-tiny", "--cluster", str(path), "--batch", "8", "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["plans"][0]["step_s"] > 0


DATA_SHEET = """[[part]]
name = "grace"
generation = "cpu"
nodes = 3
per_node = 2
bf16_tflops = 1
fp32_tflops = 1
memory_gib = 4
memory_tbps = 0.1
inside_bandwidth_gbps = 10
outside_bandwidth_gbps = 1
"""


def test_a_described_machine_is_measured(small, tmp_path):
    """Of a device that is no known kind: its plans are then near what was measured."""
    described, measured = tmp_path / "grace.toml", tmp_path / "measured.toml"
    described.write_text(DATA_SHEET)
    options = ["--only", "devices", "--quick", "--cluster", str(described), "--out", str(measured)]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 0, done.output
    assert (parse_cluster(str(measured)).device.name, parse_cluster(str(measured)).nodes) == ("grace", 3)
    reasons = {}
    for path in (described, measured):
        planned = CliRunner().invoke(app, ["plan", "gpt-tiny", "--cluster", str(path), "--batch", "48", "--json"])
        reasons[path] = json.loads(planned.stdout)["plans"][0]["extrapolated"]
    several = "Echelon was measured on one device alone"
    assert reasons == {described: ["no run on grace was measured", several], measured: [several]}


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (("per_node = 2", "per_node = 8"), [], "which has 2 CPU cores; legal: per_node=2"),
        (('"cpu"', '"npu"'), [], "does not describe this machine"),
        (("nodes", "nods"), [], 'did you mean "nodes"?'),
        (("", ""), ["--only", "steps"], "requires the devices"),
    ],
)
def test_a_file_of_another_machine_is_refused(small, tmp_path, change, options, words):
    path = tmp_path / "grace.toml"
    path.write_text(DATA_SHEET.replace(*change))
    done = CliRunner().invoke(app, ["bench", "--cluster", str(path), *options])
    assert done.exit_code == 2
    assert words in done.stderr


def test_the_table_says_what_plans_will_use(small):
    done = CliRunner().invoke(app, ["bench", "--only", "devices", "--quick"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    for words in ("256 x 256 x 256", "FLOP/s", "GB/s", "64 KiB", "all-reduce", "Plans for this machine use", "--out"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [("mine.txt", "does not end in .toml"), ("no/mine.toml", "does not exist"), ("folder.toml", "is a folder")],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.bench.bench_device.detect_device", lambda: pytest.fail("it went on"))
    (tmp_path / "folder.toml").mkdir()
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / name)])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_is_timed_on_every_rank(pool, kind):
    found = pool.run(time_collective, 2, kind, [4096, 65536], 2, "cpu")
    assert [len(seconds) for seconds in found] == [2, 2]
    assert all(0 < second < 10 for seconds in found for second in seconds)


def test_one_core_measures_no_collectives(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    found = bench_steps(local_cluster(), quick=True, on_ranks=lambda *_: pytest.fail("no ranks"))
    assert not {step.name for step in found} & set(COLLECTIVES)


def test_no_measurement_takes_more_than_its_share_of_the_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("echelon.planning.cluster.cluster._physical_memory", lambda: 32 << 20)
    names = [step.name for step in bench_steps(local_cluster(), quick=True, on_ranks=lambda *_: [])]
    assert "matmul 64 x 64 x 64" in names
    assert "matmul 1024 x 1024 x 1024" not in names


def test_curves_are_the_rows():
    rows = [
        DeviceMeasurement(what="matmul", size=(8, 4, 2), seconds=1.0, rate=128.0),
        DeviceMeasurement(what="attention", size=(16, 64), seconds=1.0, rate=64.0),
        DeviceMeasurement(what="memory", size=(1024,), seconds=1.0, rate=2048.0),
        DeviceMeasurement(what="host", size=(1024,), seconds=1.0, rate=1024.0, note="to the device"),
        DeviceMeasurement(what="host", size=(1024,), seconds=2.0, rate=512.0, note="to the host"),
        DeviceMeasurement(what="send", size=(1024,), seconds=0.5, rate=2048.0),
    ]
    wanted = {"matmul": ((8, 4, 2, 128.0),), "attention": ((16, 64, 64.0),), "send": ((1024, 0.5),)}
    assert to_curves(rows) == MeasuredCurves(memory=2048.0, host=512.0, **wanted)
    assert [format_size(row.size) for row in rows[:3]] == ["8 x 4 x 2", "16 x 64", "1 KiB"]


def test_a_processors_peaks_are_what_was_measured():
    curves = MeasuredCurves(
        matmul=((8, 8, 8, 1e10), (64, 64, 64, 9e10)), memory=7e9, send=((1 << 10, 1e-3), (1 << 20, 2e-3))
    )
    found = with_curves(parse_cluster("2xcpu"), curves)
    assert found.device.peak("bf16") == 9e10
    assert found.device.bandwidth == 7e9
    assert found.intra_node == fit_link(curves, 2)
    card = with_curves(parse_cluster("8xh100"), curves)
    assert card.device == parse_cluster("8xh100").device
    assert card.curves == curves
