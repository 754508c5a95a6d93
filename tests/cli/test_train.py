from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from echelon.cli import app

KEYS = {"run", "steps", "loss", "tokens_per_s", "mfu", "hfu", "goodput", "checkpoint"}
TINY = [
    "--set",
    "steps=3",
    "--set",
    "sample.tokens=8",
    "--set",
    "seq_len=32",
    "--set",
    "batch=4",
    "--set",
    "device=cpu",
]

OWN = """
import torch
import torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
    def forward(self, x):
        return self.net(x).square().sum(), torch.tensor(len(x))

def build():
    return Model()

def batch(rows, step):
    return {"x": torch.ones(rows, 3)}

def mistaken():
    raise ValueError("the user's own mistake")

def fails_on_one_rank():
    if dist.is_initialized() and dist.get_rank() == 1:
        raise KeyError("only rank 1")
    return Model()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a text, a custom model, and a configuration."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(500)))
    text = json.dumps(str(tmp_path / "text.txt"))
    (tmp_path / "c.toml").write_text(f'dtype = "float64"\nrun = "made"\n[data]\npath = [{text}]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.training.task.TOKEN_CACHE_DIR", tmp_path / "cache")
    return tmp_path


def command(*args, launcher=()):
    return subprocess.run(
        [sys.executable, *launcher, "-m", "echelon", "train", *args], capture_output=True, text=True, timeout=300
    )


def invoke(*args):
    return CliRunner().invoke(app, ["train", *args])


def test_json_is_one_object_and_nothing_else(here):
    done = command("c.toml", *TINY, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    shown = json.loads(done.stdout)
    assert shown.keys() >= KEYS
    assert (shown["run"], shown["steps"], shown["checkpoint"]) == ("made", 3, None)
    assert {path.name for path in (here / "made").iterdir()} == {
        "config.toml",
        "plan.json",
        "log.jsonl",
        "measured.json",
    }
    # The same command in this process, without ranks, prints the same.
    assert json.loads(invoke("c.toml", *TINY, "--json").stdout)["loss"] == shown["loss"]


def test_torchrun_just_works(here):
    alone = json.loads(invoke("c.toml", *TINY, "--json").stdout)
    done = command(
        *("c.toml", *TINY, "--set", "layout=tp=2", "--json"),
        launcher=(
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--log-dir",
            str(here / "logs"),
        ),
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["loss"] == pytest.approx(alone["loss"], abs=1e-10)
    assert shown["run"] == "made-2"


def test_a_rank_that_raises_ends_the_job_with_its_traceback(here):
    done = command("--set", "model=own.py:fails_on_one_rank", "--set", "layout=dp=2", "--set", "batch=4")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "echelon: rank 1 (dp 1) raised KeyError: 'only rank 1', in start, before the first step."
    )
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.rstrip().endswith("KeyError: 'only rank 1'")
    assert "own.py" in done.stderr


def test_the_console_shows_resolved_settings_steps_and_the_sample(here):
    shown = invoke("c.toml", *TINY, "--set", "layout=dp=1,accumulate=2", "--set", "data.mask_documents=true")
    assert shown.exit_code == 0, shown.output
    for words in (
        "llama-tiny",
        "layout: dp=1,microbatch=2,accumulate=2",
        "types: compute float64, master float64, gradients float64",
        "step 1/3",
        "step 3/3",
        "evaluation at step 3",
        "done: made",
        "sample:",
    ):
        assert words in shown.stdout, words
    assert shown.stderr == ""


def test_a_custom_model_has_no_mfu_and_valid_json(here):
    shown = invoke("--set", "model=own.py:build", "--set", "steps=2", "--set", "batch=4", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found["mfu"] is found["hfu"] is None
    assert found["run"].startswith("runs/own.py-build-")


def test_an_error_of_a_users_factory_is_not_hidden(here):
    # In one process it is raised right here: Python shows its traceback, once.
    shown = invoke("--set", "model=own.py:mistaken", "--set", "batch=4")
    assert isinstance(shown.exception, ValueError)
    assert str(shown.exception) == "the user's own mistake"
    assert shown.exit_code == 1
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "model=own.py:biuld"], ["own.py:biuld names nothing in the file", 'did you mean "build"?']),
        (["--set", "model=nowhere.py:build"], ["nowhere.py:build names no Python file"]),
        (["missing.toml"], ["config=missing.toml cannot be read"]),
        (["--set", "steps"], ["set=steps is not a setting"]),
        (["--set", "layout=offload=activations,recompute=budget:1GiB"], ["offload=activations offloads"]),
        (["--set", "clip=-1", "--set", "dtype=float8", "--set", "modle=x"], ["clip=-1", "dtype=float8", '"model"']),
        (["--set", "layout=dp=3", "--procs", "2"], ["dp=3"]),
        (["--procs", "0", "--set", "clip=-1"], ["procs=0", "legal: 1 or more", "clip=-1"]),
        (["--procs", "100000"], ["procs=100000"]),
        (["--set", "layout=dp=2", "--set", "run=/proc/foo"], ["cannot write the run", "set run to another"]),
        (["--set", "layout=dp=2", "--set", 'shard.units=["nope"]'], ["no module matches the unit pattern (nope)"]),
        (["--set", "model=own.py:build", "--set", "layout=tp=4,tp_kind=2d", "--set", "batch=4"], ["split"]),
    ],
)
def test_bad_input_is_refused_without_a_traceback(here, args, words):
    shown = invoke(*args, "--json")
    assert shown.exit_code == 2
    for word in words:
        assert word in shown.stderr, shown.stderr
    assert json.loads(shown.stdout) == {"errors": shown.stderr.splitlines()}
    assert "Traceback" not in shown.output + shown.stderr
    assert not (here / "runs").exists()


def test_under_torchrun_procs_must_be_what_was_started(here, monkeypatch):
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    shown = invoke("--procs", "3")
    assert shown.exit_code == 2
    assert "procs=3 is not the number of ranks that the launcher started; legal: 2" in shown.stderr
