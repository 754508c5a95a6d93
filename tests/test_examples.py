"""The examples run as their first lines say, and stay as short as promised."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(folder, *args):
    """In another folder, with warnings as errors: a user's console stays clean."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done


def lines_of_code(path):
    """Lines that are not blank, comment or docstring."""
    text = path.read_text()
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.split("#")[0].strip()) and number not in strings for number, line in lines)


def test_a_custom_model_takes_less_than_thirty_lines():
    assert 15 < lines_of_code(EXAMPLES / "custom_model.py") < 30


def test_a_custom_model_learns_on_two_ranks(tmp_path):
    done = run(tmp_path, "-W", "error", EXAMPLES / "custom_model.py")
    assert done.stderr == ""
    assert "custom_model.py:build on 2 x cpu" in done.stdout
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses[-1] < losses[0] / 2
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert sum('"kind": "step"' in line for line in lines) == 60


def test_a_custom_model_is_verified():
    args = ("--model", f"{EXAMPLES}/custom_model.py:build", "--layouts", "dp=2; dp=3,zero=3", "--json")
    found = json.loads(CliRunner().invoke(app, ["verify", *args]).stdout)
    assert found["passed"]
    assert len(found["layouts"]) == 2


def test_a_custom_loop_runs_under_torchrun(tmp_path):
    # --standalone takes a free port: torchrun's own port may be in use by another test.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, *torchrun, EXAMPLES / "custom_loop.py")
    shown = re.findall(r"like (DDP|FSDP) +(\S+) +loss (\S+) -> (\S+), (\d+) tensors", done.stdout)
    assert [(name, layout) for name, layout, *_ in shown] == [("DDP", "dp=2"), ("FSDP", "dp=2,zero=3")]
    ddp, fsdp = (tuple(map(float, losses)) for _, _, *losses in shown)
    assert ddp == pytest.approx(fsdp, abs=1e-5)
    assert ddp[1] < ddp[0] / 2
    assert ddp[2] == 4


def test_compression_saves_fewer_bytes_in_a_cnn(tmp_path):
    done = run(tmp_path, "-W", "error", EXAMPLES / "vision.py", "2")
    assert done.stderr == ""
    shown = re.findall(r"(\S+) +(\S+) MiB kept, loss (\S+) -> (\S+)", done.stdout)
    plain, lossless, rounded = shown
    assert plain[2:] == lossless[2:]
    assert float(plain[1]) > 2.5 * float(lossless[1]) > 4 * float(rounded[1])
    assert float(rounded[3]) == pytest.approx(float(plain[3]), rel=0.01)


@pytest.mark.parametrize(
    ("name", "layouts", "learns"),
    [
        ("custom_tensor_parallel", ["dp=1,tp=2,sp=0", "dp=2,zero=3,tp=2,sp=0"], 0.25),
        (
            "custom_context_parallel",
            ["dp=1,cp=2", "dp=1,cp=3,cp_kind=gather", "dp=1,cp=4,cp_kind=ulysses", "dp=2,zero=3,cp=2"],
            0.7,
        ),
    ],
)
def test_a_custom_model_with_tp_or_cp_is_verified_and_learns(tmp_path, name, layouts, learns):
    done = run(tmp_path, "-W", "error", EXAMPLES / f"{name}.py")
    assert done.stderr == ""
    *verdicts, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in verdicts] == [["PASS", layout] for layout in layouts]
    first, final = map(float, re.fullmatch(r"loss (\S+) -> (\S+)", last).groups())
    assert final < first * learns
