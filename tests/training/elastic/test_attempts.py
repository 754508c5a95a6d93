"""Interrupted runs restart by themselves, and end like an uninterrupted run. Real processes on gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from echelon.checkpoint.load import open_index
from echelon.checkpoint.storage import LocalStorage
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.faults.graceful_stop import EXIT_STATUS
from echelon.launch.rank_failure import RankError, RankFailure
from echelon.layout import Layout, ValidationError
from echelon.training import loop
from echelon.training.elastic import supervisor
from echelon.training.elastic.attempts import Attempt, find_run, last_layout, resume_target
from echelon.training.elastic.replan import LayoutChange, plan_layout_change
from echelon.training.loop import train_on_rank
from echelon.training.run.resume import resumed_config
from echelon.training.run.run_dir import Run, default_run_path
from echelon.training.start_training import run_training

STEPS = 9


def settings(folder: Path, **changes: object) -> list[str]:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} and {n * n}; " for n in range(3000)))
    asked = {
        "data.path": json.dumps([str(text)]),
        "seq_len": 16,
        "batch": 6,
        "steps": STEPS,
        "dtype": "float64",
        "eval.every": 0,
        "sample.tokens": 0,
        "checkpoint.every": 1,
        "device": "cpu",
        "schedule.warmup": 2,
        "timeout": 600,
        "run": str(folder / "run"),
        **changes,
    }
    return [f"{key}={value}" for key, value in asked.items()]


def config(folder: Path, layout: str, **changes: object) -> Config:
    return Config.load(None, settings(folder, layout=layout, **changes))


TYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}


def weights(path: str | Path) -> dict[str, np.ndarray]:
    """The state after a run's last step, put together from what its ranks wrote."""
    folder, found = Path(path) / "checkpoints", {}
    for name, tensor in open_index(LocalStorage(folder), STEPS).tensors.items():
        found[name] = np.empty(tensor.shape)
        for stored in tensor.slices:
            extent = [b - a for a, b in stored.box]
            file = folder / f"step-{STEPS:08d}" / stored.file
            values = np.fromfile(file, TYPES[tensor.dtype], int(np.prod(extent)), offset=stored.offset)
            found[name][tuple(slice(a, b) for a, b in stored.box)] = values.reshape(extent)
    return found


def are_equal(one: Path, other: Path) -> bool:
    """As design has it: 1e-10 in float64."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return all(np.abs(a[n] - b[n]).max() <= 1e-10 * max(1.0, np.abs(b[n]).max()) for n in b if b[n].size)


def state(path: str | Path) -> str:
    """A hash of all of it."""
    return open_index(LocalStorage(Path(path) / "checkpoints"), STEPS).hash


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory):
    """By layout: the directory of an uninterrupted run."""
    done: dict[str, Path] = {}

    def of(layout: str) -> Path:
        if layout not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            pool.run(train_on_rank, Layout.parse(layout).world, config(folder, layout), True)
            done[layout] = folder / "run"
        return done[layout]

    return of


def records(path: Path, kind: str) -> list[dict]:
    return list(Run.open(path).records(kind))


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restart_resumes_from_the_requested_checkpoint_unless_it_progressed(tmp_path):
    """A rank that failed before the first attempt had gone on from it made the next one take the newest."""
    made = Run.create(config(tmp_path, "dp=2"), {"layout": "dp=2", "elastic": "first"})
    made.log("start", time=0.0, after=0, elastic="first")
    asked = str(made.path / "checkpoints" / "step-00000004")
    assert resume_target(made.path, asked, "second") == asked
    made.log("start", time=1.0, after=4, elastic="second")
    assert resume_target(made.path, asked, "second") == str(made.path)
    assert resume_target(made.path, str(made.path), "third") == str(made.path)
    assert resume_target(None, "", "third") == ""
    made.close()


def test_a_killed_rank_is_restarted_and_the_run_is_bit_equal(tmp_path, undisturbed, capfd):
    asked = config(tmp_path, "dp=2", **{"elastic.restarts": 2})
    summary = run_training(asked, quiet=True, inject=["kill:rank=1,step=6"])
    path = tmp_path / "run"
    assert Path(summary.run) == path
    assert state(path) == state(undisturbed("dp=2"))
    (again,) = records(path, "restart")
    assert (again["number"], again["of"], again["ranks"]) == (1, 2, [1])
    assert again["text"].startswith("rank 1 (dp 1) ended without an exception: the process was ended by SIGKILL, in")
    assert again["text"] == records(path, "diagnosis")[0]["text"]
    assert len(records(path, "injected")) == 1
    (resumed,) = records(path, "resume")
    assert resumed["step"] >= 4
    assert summary.time["restarts"] == 1
    reported = capfd.readouterr().err
    assert reported.count("rank 1 (dp 1) ended") == 1
    assert "in forward of step 6. Restart 1 of 2." in reported


def test_user_errors_are_not_retried(tmp_path, capfd, monkeypatch):
    own = "import torch\ndef build():\n    raise ValueError('mine')\ndef batch(rows, step):\n    return {}\n"
    (tmp_path / "own.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    asked = Config(model="own.py:build", batch=4, steps=3, layout="dp=2", device="cpu", run="run")
    asked = Config.from_toml(asked.to_toml().replace("restarts = 0", "restarts = 3"))
    with pytest.raises(RankError, match="mine"):
        run_training(asked, quiet=True)
    assert "Restart" not in capfd.readouterr().err


# -- other ranks than before ------------------------------------------------------------------------------------------


def test_the_run_continues_in_another_layout_without_a_broken_rank(tmp_path, undisturbed, capfd):
    changes = {"elastic.restarts": 1, "elastic.replan": "true"}
    summary = run_training(config(tmp_path, "dp=3", **changes), quiet=True, inject=["gone:rank=1,step=6"])
    path = tmp_path / "run"
    assert are_equal(path, undisturbed("dp=3"))
    assert [record["ranks"] for record in records(path, "restart")] == [[1]]
    (change,) = records(path, "replan")
    assert change["from"].startswith("dp=3")
    assert Layout.parse(change["to"]).world == change["ranks"] == 2
    assert change["why"] == "rank 1 failed 2 times in a row"
    assert change["predicted_step_s"] > 0
    assert summary.time["restarts"] == 1  # the second attempt did not come to its start
    reported = capfd.readouterr().err
    assert "The run continues without that rank: layout dp=3" in reported
    assert records(path, "resume")[-1]["layout"] == change["to"]


def test_without_replan_the_error_names_the_number_of_restarts(tmp_path, capfd):
    with pytest.raises(RankError, match=r"(?s)^rank 1 .*SIGKILL, in start.*This was after 1 restart\.$") as caught:
        run_training(config(tmp_path, "dp=2", **{"elastic.restarts": 1}), quiet=True, inject=["gone:rank=1,step=4"])
    assert caught.value.rank == 1
    assert f"with: echelon train --resume {tmp_path / 'run'}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("batch", "idle_ranks", "words"), [(24, (7,), "rank 7 idles"), (8, (5, 6, 7), "ranks 5, 6, 7 idle")]
)
def test_ranks_that_cannot_share_the_batch_idle(batch, idle_ranks, words):
    """Six ranks divide 24 sequences. 8 take as long on four as on six: of four layers, one of three stages has two."""
    asked = Config(batch=batch, seq_len=128, layout="dp=8", device="cpu")
    change = plan_layout_change(asked, "dp=8", 7, reason="rank 2 failed", rank_numbers=[0, 1, 3, 4, 5, 6, 7])
    assert change is not None
    assert change.used_ranks == 7 - len(idle_ranks)
    assert change.idle_ranks == idle_ranks
    assert words in str(change)
    assert change == plan_layout_change(asked, "dp=8", 7, reason="rank 2 failed", rank_numbers=[0, 1, 3, 4, 5, 6, 7])
    assert Layout.parse(change.new_layout, batch=batch).batch == batch


def test_a_custom_model_keeps_its_tp_and_pp_when_replanned(tmp_path, monkeypatch):
    own = "import torch\ndef build(): ...\ndef batch(rows, step): ...\n"
    (tmp_path / "own.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    asked = Config(model="own.py:build", batch=12, layout="dp=4,zero=1", device="cpu")
    change = plan_layout_change(asked, "dp=4,zero=1", 3, reason="")
    assert change is not None
    assert (change.new_layout, change.step_seconds) == ("dp=3,zero=1", None)
    change = plan_layout_change(
        Config(model="own.py:build", batch=8, layout="dp=4", device="cpu"), "dp=4", 3, reason=""
    )
    assert change is not None
    assert (change.new_layout, change.idle_ranks) == ("dp=2", (2,))


def test_a_custom_model_keeps_its_cp_when_replanned(tmp_path, monkeypatch):
    """No layout is of more ranks than there are."""
    (tmp_path / "own.py").write_text("import torch\ndef build(): ...\ndef batch(rows, step): ...\n")
    monkeypatch.chdir(tmp_path)
    asked = Config(model="own.py:build", batch=12, layout="dp=2,cp=2", device="cpu")
    change = plan_layout_change(asked, "dp=2,cp=2", 2, reason="")
    assert change is not None
    assert (change.new_layout, change.used_ranks) == ("dp=1,cp=2", 2)


def test_asynchronous_schedules_cannot_be_replanned(tmp_path):
    with pytest.raises(ValidationError, match=r"elastic\.replan=true would change the updates"):
        config(tmp_path, "pp=2,schedule=pipedream,accumulate=6", **{"elastic.replan": "true"})


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


def terminated(path: Path, step: int) -> threading.Thread:
    """Sends SIGTERM to this process when a run has come to a step."""

    def wait() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            log = path / "log.jsonl"
            if log.exists() and f'"step": {step},' in log.read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_sigterm_of_the_launcher_saves_and_the_run_resumes(tmp_path, undisturbed):
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "run"
    asked = config(tmp_path, "dp=2", **{"checkpoint.every": 0})
    thread = terminated(path, 3)
    # It would be through before the signal came: one rank is slow.
    summary = run_training(asked, quiet=True, inject=["slow-rank:rank=1,factor=20"])
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    (stopped,) = records(path, "stopped")
    assert 3 <= summary.stopped == stopped["step"] < STEPS
    assert LocalStorage(path / "checkpoints").steps() == [summary.stopped]
    assert not records(path, "end")
    resumed = run_training(resumed_config(path, [f"steps={STEPS}", "checkpoint.every=1"]), quiet=True, resume=str(path))
    assert resumed.stopped is None
    assert state(path) == state(undisturbed("dp=2"))


@pytest.mark.parametrize("layout", ["tp=2", "pp=2,accumulate=2"])
def test_sigterm_of_one_rank_stops_all_after_the_same_step(tmp_path, layout):
    asked = config(tmp_path, layout, batch=4)
    summary = run_training(asked, quiet=True, inject=["kill:rank=1,step=4,signal=SIGTERM"])
    assert summary.stopped in (4, 5)
    assert LocalStorage(tmp_path / "run" / "checkpoints").steps()[-1] == summary.stopped


def test_sigterm_of_one_process_exits_with_143(tmp_path):
    path = tmp_path / "run"
    words = [word for text in settings(tmp_path, steps=5000) for word in ("--set", text)]
    thread = terminated(path, 5)
    done = CliRunner().invoke(app, ["train", "--procs", "1", *words])
    thread.join()
    (stopped,) = records(path, "stopped")
    assert done.exit_code == EXIT_STATUS == 143
    said = " ".join(done.output.split())
    assert f"stopped by SIGTERM after step {stopped['step']}; resume with: echelon train --resume" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
def test_a_signal_to_every_process_of_a_run(tmp_path, number):
    """As a scheduler sends it, or a terminal: the process that ranks are forked from was ended with them."""
    path = tmp_path / "run"
    words = [word for text in settings(tmp_path, steps=5000, layout="dp=2") for word in ("--set", text)]
    command = [sys.executable, "-m", "echelon", "train", *words]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 300
        while not (path / "checkpoints" / "step-00000003").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, number)
        said = " ".join(process.communicate(timeout=300)[0].decode().split())
    assert process.returncode == 128 + number, said
    assert f"with: echelon train --resume {path}" in said
    assert len(records(path, "stopped")) == (number == signal.SIGTERM)


def test_a_restart_does_not_wait_for_the_lock_of_a_lost_machine(tmp_path, monkeypatch):
    """A disk that machines share may keep it long after them."""
    asked = config(tmp_path, "dp=1", steps=2)
    path = Path(train_on_rank(asked, True).run)
    again = Attempt(config=resumed_config(path, ["steps=3"]), resume=str(path), restart_count=1)
    monkeypatch.setattr(loop, "join_attempt", lambda *_: (again, None))
    with Run.open(path) as held:
        assert held.lock()
        train_on_rank(again.config, True, resume=str(path))
    assert [record["step"] for record in records(path, "step")] == [1, 2, 3]


@pytest.mark.parametrize(("messages", "hints"), [((), ["the run has ended"]), (("the data has changed",), [])])
def test_only_a_failure_that_a_resume_may_pass_is_followed_by_its_command(monkeypatch, messages, hints):
    failure, shown = RankFailure(rank=0, time_ns=0, reason="why", user_errors=messages), []

    def fail(self, quiet, inject):
        raise RankError("why", rank=0, reason="why", failure=failure)

    monkeypatch.setattr(supervisor._LaunchAttempt, "run", fail)
    monkeypatch.setattr(supervisor._LaunchAttempt, "print_resume_hint", lambda self, why: shown.append(why))
    with pytest.raises(RankError, match="why"):
        supervisor.supervise(Config(), quiet=True, inject=(), resume="", procs=2)
    assert shown == hints


def test_ranks_that_are_lost_one_after_another_are_those_of_the_first_attempt(monkeypatch):
    """Rank 1 of the second attempt is rank 2 of the first: its GPU is left out, and not that of rank 1 again."""
    devices = []

    def fail_twice(self, quiet, inject):
        devices.append([*self.devices])
        if len(devices) == 3:
            return "summary"
        raise RankError("why", rank=1, reason="why", failure=RankFailure(rank=1, time_ns=0, reason="why"))

    def one_rank_less(self, error, remaining_ranks, requested_config):
        layout = f"dp={len(remaining_ranks) - 1}"
        return LayoutChange(old_layout="", new_layout=layout, step_seconds=None, reason="")

    monkeypatch.setattr(supervisor._LaunchAttempt, "run", fail_twice)
    monkeypatch.setattr(supervisor._LaunchAttempt, "layout_without_failed_rank", one_rank_less)
    assert supervisor.supervise(Config(), quiet=True, inject=(), resume="", procs=4) == "summary"
    assert devices == [[], [0, 2, 3], [0, 3]]


def test_the_last_layout_is_that_of_the_last_attempt(tmp_path):
    with Run.create(Config(run=str(tmp_path / "run")), {"layout": "dp=4"}) as run:
        assert last_layout(run) == "dp=4"
        for layout in ("dp=3", "dp=2"):
            run.log("resume", layout=layout)
            assert last_layout(run) == layout


def test_of_several_runs_of_one_id_the_newest_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = config(tmp_path, "dp=1", run="")
    paths = [Path(f"{default_run_path(asked).resolve()}{suffix}") for suffix in ("", "-2", "-3")]
    for path, age in zip(paths, (300, 100, 200), strict=True):
        with Run.create(replace(asked, run=str(path)), {"layout": "dp=1", "elastic": "named"}):
            os.utime(path / "plan.json", (time.time() - age,) * 2)
    found = find_run(asked, "", "named", restarted=True)
    assert found is not None
    assert found.resolve() == paths[1]


def test_a_finished_run_is_resumed_after_a_restart_only_if_it_has_started_again(tmp_path):
    """With more steps, for example."""
    asked = config(tmp_path, "dp=1")
    with Run.create(asked, {"layout": "dp=1", "elastic": "named"}) as run:
        assert find_run(asked, "", "named", restarted=True) == run.path
        run.log("end")
        assert find_run(asked, "", "named", restarted=True) is None
        run.log("start", time=1.0, after=STEPS, elastic="named")
        assert find_run(asked, "", "named", restarted=True) == run.path
