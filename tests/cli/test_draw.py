from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cpu_clock import cpu_seconds
from expert_log_records import records
from typer.testing import CliRunner

from echelon.cli import app
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import FAMILIES, make_schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import TIMELINE_FILE, Timeline, write_timelines

OWN = """# 1F1B, 2 ranks, 2 microbatches
rank 0, stages 0: 0F0 0F1 0B0 0B1 0U1
rank 1, stages 1: 1F0 1B0 1F1 1B1 1U1
"""


def invoke(*args, **environment):
    return CliRunner().invoke(app, ["draw", *map(str, args)], env={"COLUMNS": "80", **environment})


@pytest.fixture
def run(tmp_path):
    schedule = make_schedule("1f1b", 2, 3)
    real = simulate(lower(schedule), Durations(forward=1.5))
    spans = [list(real.spans(rank)) for rank in range(2)]
    write_timelines(tmp_path, simulate(schedule), Timeline.from_spans("1f1b", (0, 1), spans))
    return tmp_path


def test_a_schedule_as_text():
    shown = invoke("1f1b", "--stages", 4, "--microbatches", 8)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == "1f1b: 4 ranks, 8 microbatches"
    assert lines[1] == "rank 0 F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--"
    assert lines[-1] == "bubble 27.3 %, in flight 4 3 2 1, duration 33"
    assert shown.stdout == invoke("1f1b").stdout
    assert all(len(line) <= 80 for line in lines)


def test_colour_where_there_is_some():
    plain = {"TERM": "xterm-256color", "FORCE_COLOR": "1"}
    assert "\x1b[" in invoke("1f1b", **plain).stdout
    without = invoke("1f1b", **plain, NO_COLOR="1").stdout
    assert "F0F1F2F3....." in without
    assert "48;" not in without


@pytest.mark.parametrize("name", FAMILIES)
def test_json(name):
    shown = invoke(name, "--stages", 3, "--microbatches", 6, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found.keys() == {"bubble", "in_flight", "duration", "ranks", "note"}
    expected = simulate(make_schedule(name, 3, 6))
    assert (found["bubble"], found["duration"]) == (expected.bubble, expected.duration)
    assert found["in_flight"] == list(expected.in_flight)
    assert found["ranks"] == [[str(action) for action in actions] for actions in expected.rank_actions]


def test_sizes_and_durations():
    options = ["--stages", 2, "--microbatches", 3, "--chunks", 3]
    times = ["--forward", 2, "--input-grad", 3, "--weight-grad", 0.5, "--link", 0.25]
    found = json.loads(invoke("interleaved", *options, *times, "--json").stdout)
    durations = Durations(forward=2, input_grad=3, weight_grad=0.5, send_forward=0.25, send_backward=0.25)
    schedule = make_schedule("interleaved", 2, 3, chunks=3)
    expected = simulate(schedule, durations)
    assert (found["bubble"], found["duration"]) == pytest.approx((expected.bubble, expected.duration))
    # The list is the schedule's, whatever the durations.
    assert found["ranks"] == [[str(action) for action in actions] for actions in schedule.rank_actions]
    found = json.loads(invoke("terapipe", "--slices", 3, "--microbatches", 1, "--json").stdout)
    assert found["ranks"][0][:3] == ["0F0", "0F0.1", "0F0.2"]


def test_files(tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    shown = invoke("zb-v", "--link", 0.5, "--svg", svg, "--html", html)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[-2:] == [f"wrote {svg}", f"wrote {html}"]
    assert svg.read_text().startswith("<svg")
    assert "message" in svg.read_text()
    assert html.read_text().startswith("<!doctype html>")
    shown = invoke("zb-v", "--svg", svg, "--json")
    assert json.loads(shown.stdout)["duration"] == 51
    assert "message" not in svg.read_text()


def test_a_custom_schedule(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(OWN)
    found = json.loads(invoke(f"file:{path}", "--json").stdout)
    assert (found["duration"], found["in_flight"]) == (9, [2, 1])
    assert json.loads(invoke(f"file:{path}", "--stages", 2, "--microbatches", 2, "--json").stdout) == found
    shown = invoke(f"file:{path}", "--stages", 4, "--chunks", 2)
    assert shown.exit_code == 2
    assert shown.stderr.splitlines() == ["--stages=4 does not match the file", "--chunks=2 does not match the file"]
    assert invoke(f"file:{path}x").exit_code == 2


def test_no_schedule_lists_them():
    shown = invoke()
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*FAMILIES, "file:PATH"]
    assert all(family.title in line for family, line in zip(FAMILIES.values(), lines, strict=False))
    found = json.loads(invoke("--json").stdout)
    assert found == {"schedules": {name: family.title for name, family in FAMILIES.items()}}
    assert invoke("--stages", 3).exit_code == 2


def test_a_run_is_drawn_planned_over_measured(run, tmp_path):
    shown = invoke(run, "--svg", tmp_path / "run.svg")
    assert shown.exit_code == 0, shown.output
    assert "planned: bubble 25.0 %, in flight 2 1, duration 12 s" in shown.stdout
    assert "measured: bubble" in shown.stdout
    assert "measured · bubble" in (tmp_path / "run.svg").read_text()
    found = json.loads(invoke(run, "--json").stdout)
    assert found.keys() == {"bubble", "in_flight", "duration", "ranks", "note", "planned"}
    assert (found["duration"], found["planned"]["duration"]) == (14, 12)
    assert found["ranks"] == found["planned"]["ranks"]


@pytest.mark.parametrize("key", ["planned", "measured"])
def test_a_run_may_have_one_of_both(run, key):
    both = json.loads((run / TIMELINE_FILE).read_text())
    (run / TIMELINE_FILE).write_text(json.dumps({key: both[key]}))
    found = json.loads(invoke(run, "--json").stdout)
    assert found["duration"] == {"planned": 12, "measured": 14}[key]
    assert "planned" not in found


def with_experts(folder):
    """A log whose last line was cut off when the run was killed."""
    lines = [json.dumps(line) for line in records(layers=2, experts=4, steps=6)]
    (folder / "log.jsonl").write_text("\n".join([*lines, lines[0][:40]]))
    return folder


def test_a_run_with_experts_and_no_pipeline(tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    shown = invoke(with_experts(tmp_path), "--svg", svg, "--html", html)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("loads of experts: 2 layers of 4 experts, steps 1 to 6\n")
    assert "no token in the run: expert 1" in shown.stdout
    assert svg.read_text().startswith("<svg")
    assert html.read_text().startswith("<!doctype html>")
    found = json.loads(invoke(tmp_path, "--json").stdout)
    assert found.keys() == {"experts"}
    assert found["experts"]["steps"] == [1, 6]
    assert [layer["never"] for layer in found["experts"]["layers"]] == [[], [1]]


def test_a_run_with_experts_and_a_pipeline(run):
    shown = invoke(with_experts(run)).stdout
    assert shown.index("measured: bubble") < shown.index("loads of experts")
    found = json.loads(invoke(run, "--json").stdout)
    assert found.keys() == {"bubble", "in_flight", "duration", "ranks", "note", "planned", "experts"}


def test_invalid_requests_are_reported(tmp_path):
    def says(*args):
        shown = invoke(*args, "--json")
        assert shown.exit_code == 2
        assert json.loads(shown.stdout) == {"errors": shown.stderr.splitlines()}
        return shown.stderr

    assert 'did you mean "1f1b"?' in says("1f1bb")
    assert "dualpipe-v" in says("dualpipe")
    assert f"nothing to draw in the run ({tmp_path}): it has no timeline" in says(tmp_path)
    assert "no expert load, which runs of MoE models log" in says(tmp_path)
    assert "--stages=4 applies to schedules" in says(tmp_path, "--stages", 4)
    assert "cannot be written" in says("1f1b", "--svg", tmp_path / "none" / "a.svg")
    faults = says("1f1b", "--stages", 0, "--forward", -1, "--link", "nan").splitlines()
    assert [fault.split("=")[0] for fault in faults] == ["--stages", "--forward", "--link"]
    assert "choose terapipe" in invoke("1f1b", "--slices", 2).stderr


@pytest.mark.parametrize("sizes", [["--stages", "1000000"], ["--chunks", "1000", "--microbatches", "1000"]])
def test_a_schedule_that_is_too_large_is_refused(sizes):
    result = CliRunner().invoke(app, ["draw", "interleaved", *sizes])
    assert result.exit_code == 2
    assert "stages x microbatches x chunks x slices exceed 100,000" in result.output


def test_it_starts_quickly_without_torch(tmp_path):
    code = (
        "import sys\nfrom echelon.cli import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "finally:\n    print([name for name in ('torch', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    args = ["draw", "zb-v", "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html"]
    best = 9.9
    for _ in range(3):
        begun = cpu_seconds()
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
        best = min(best, cpu_seconds() - begun)
        assert (done.returncode, done.stderr.strip()) == (0, "[]")
        if best < 1:
            break
    assert best < 1
