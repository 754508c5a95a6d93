"""A killed run resumes from its last checkpoint and ends bit-equal to an uninterrupted one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import small

from echelon.checkpoint.checkpoint_index import CheckpointError
from echelon.checkpoint.load import open_index
from echelon.checkpoint.storage import WRITING_PREFIX, LocalStorage
from echelon.config.run_config import Config
from echelon.faults.injection_spec import parse_injections
from echelon.launch.rank_failure import RankError
from echelon.layout import ValidationError
from echelon.training.loop import train_on_rank
from echelon.training.run.resume import parse_resume_path, resumed_config
from echelon.training.run.run_dir import Run
from echelon.training.start_training import default_procs
from tests.checkpoint.killed_runs import train

STEPS = 9


def config(folder: Path, layout: str = "dp=2,zero=1", **changes: object) -> Config:
    usual = {"steps": STEPS, "checkpoint.every": 2, "schedule.warmup": 2, "dropout": 0.1}
    return small(folder, layout, **{**usual, **changes})


def states(run: str | Path) -> dict[int, str]:
    """The hash of every checkpoint."""
    storage = LocalStorage(Path(run) / "checkpoints")
    return {step: open_index(storage, step).hash for step in storage.steps()}


def losses(run: str | Path) -> dict[int, float]:
    """The last logged loss of every step."""
    return {record["step"]: record["loss"] for record in Run.open(run).records("step")}


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    reported = pool.run(train, 2, config(folder, **{"checkpoint.keep": 0}))[0]
    return folder, reported


def test_checkpoints_of_a_run(undisturbed):
    _, reported = undisturbed
    found = states(reported["run"])
    assert list(found) == [2, 4, 6, 8, STEPS]
    assert reported["checkpoint"].endswith(f"step-{STEPS:08d}")
    records = list(Run.open(reported["run"]).records("checkpoint"))
    assert [record["hash"] for record in records] == list(found.values())


@pytest.mark.parametrize(
    ("moment", "rank", "step", "left"),
    [("step", 1, 1, []), ("step", 1, 6, [2, 4]), ("write", 1, 6, [2, 4]), ("commit", 0, 4, [2])],
)
def test_killed_at_some_moment(pool, tmp_path, undisturbed, moment, rank, step, left):
    """In a step, with a save in flight, and during the rename that makes a checkpoint exist."""
    asked = config(tmp_path)
    with pytest.raises(RankError):
        pool.run(train, 2, asked, "", moment, rank, step)
    run = tmp_path / "run"
    found = list(states(run))
    # In a step, the previous save has finished or is still in flight.
    assert found == left or (moment == "step" and found == left[:-1])
    reported = pool.run(train, 2, resumed_config(run, []), str(run))[0]
    _, other = undisturbed
    assert losses(run) == losses(other["run"])
    assert states(run)[STEPS] == states(other["run"])[STEPS]
    assert list(states(run)) == [8, STEPS]  # checkpoint.keep = 2
    assert not list((run / "checkpoints").glob(f"{WRITING_PREFIX}*"))
    assert Path(reported["run"]) == run


def test_other_numbers_of_ranks_see_the_same_samples(pool, tmp_path, undisturbed):
    """Losses are those of the run on two ranks: the samples are the same ones, in the same order."""
    _, other = undisturbed
    asked = config(tmp_path, "dp=4", steps=6)
    reported = pool.run(train, 4, asked)[0]
    # steps=6 has another learning rate; the samples do not depend on it
    again = resumed_config(Path(reported["run"]), [f"steps={STEPS}", "layout=tp=2"])
    pool.run(train, 2, again, f"{reported['run']}/checkpoints/step-00000006")
    assert losses(reported["run"])[1] == pytest.approx(losses(other["run"])[1], rel=1e-5)
    assert sorted(losses(reported["run"])) == list(range(1, STEPS + 1))


def test_from_an_earlier_checkpoint(pool, tmp_path, undisturbed):
    """Later checkpoints are set aside: they belong to another history."""
    asked = config(tmp_path, steps=6, **{"checkpoint.keep": 0})
    pool.run(train, 2, asked)
    run = tmp_path / "run"
    again = resumed_config(run, ["optimizer.lr=1e-4", "steps=5"])
    pool.run(train, 2, again, str(run / "checkpoints" / "step-00000002"))
    assert list(states(run)) == [2, 4, 5]
    assert sorted(path.name for path in (run / "checkpoints").glob("left-*")) == [
        "left-step-00000004",
        "left-step-00000006",
    ]


def test_a_disk_that_fills_up_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    asked = config(tmp_path, "dp=1")
    write = LocalStorage.write

    def full(self, step, name, file, *until):
        if step == 4:
            raise CheckpointError("a checkpoint cannot be written (part-00000.safetensors: no space left on device)")
        write(self, step, name, file, *until)

    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(CheckpointError, match="no space left"):
        train_on_rank(asked, quiet=True)
    assert list(states(tmp_path / "run")) == [2]
    assert max(losses(tmp_path / "run")) < STEPS
    monkeypatch.undo()
    train_on_rank(resumed_config(tmp_path / "run", []), quiet=True, resume=str(tmp_path / "run"))
    assert sorted(losses(tmp_path / "run")) == list(range(1, STEPS + 1))


def test_a_complete_run_is_not_resumed(pool, undisturbed):
    _, reported = undisturbed
    with pytest.raises(RankError, match=r"the run is already complete \(step 9 of 9\); increase steps"):
        pool.run(train, 2, resumed_config(Path(reported["run"]), []), reported["run"])


def test_keys_that_cannot_change_on_resume(undisturbed):
    _, reported = undisturbed
    with pytest.raises(ValidationError) as caught:
        resumed_config(Path(reported["run"]), ["seed=3", "batch=8", "layout=tp=2"])
    assert [fault.key for fault in caught.value.issues] == ["batch", "seed"]


@pytest.mark.parametrize(
    ("setting", "saved", "changed"), [("tied", "false", "true"), ("gate", "mixtral", "switch"), ("seq_len", "16", "8")]
)
def test_settings_that_define_the_model_cannot_change_on_resume(tmp_path, setting, saved, changed):
    with Run.create(config(tmp_path, "dp=1", model="moe-tiny", **{setting: saved}), {"layout": "dp=1"}) as run:
        assert resumed_config(run.path, [f"{setting}={saved}", "steps=20"]).steps == 20
        with pytest.raises(ValidationError, match="cannot change when a run resumes") as caught:
            resumed_config(run.path, [f"{setting}={changed}"])
    assert [fault.key for fault in caught.value.issues] == [setting]


def test_a_setting_that_was_unset_cannot_be_set_on_resume(tmp_path):
    """It was noticed when the checkpoint was loaded, by all ranks."""
    with (
        Run.create(config(tmp_path, "dp=1", model="moe-tiny"), {"layout": "dp=1"}) as run,
        pytest.raises(ValidationError, match="tied=true cannot change when a run resumes; legal: unset, or a new run"),
    ):
        resumed_config(run.path, ["tied=true"])


def test_missing_optimizer_states(undisturbed):
    """The error named optimizer.eps, which was not set."""
    _, reported = undisturbed
    with pytest.raises(ValidationError) as caught:
        resumed_config(Path(reported["run"]), ["optimizer.name=lion"])
    (fault,) = caught.value.issues
    assert str(fault) == 'optimizer.name="lion" cannot change when a run resumes; legal: "adamw", or a new run'
    assert resumed_config(Path(reported["run"]), ['optimizer.name="adamw"', "optimizer.states=float32"])


def test_a_checkpoint_names_its_run():
    assert parse_resume_path("runs/a/checkpoints/step-00000012") == (Path("runs/a"), 12)
    assert parse_resume_path("runs/a") == (Path("runs/a"), None)


def test_keys_of_checkpoints_do_something_or_are_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"checkpoint\.keep"):
        config(tmp_path, **{"checkpoint.every": 0, "checkpoint.keep": 3})
    assert replace(config(tmp_path)).checkpoint.keep == 2


def test_a_run_whose_checkpoints_are_gone_does_not_start_anew(pool, tmp_path):
    """The disk was not mounted, and a run of weeks restarted at step 1."""
    asked = config(tmp_path, "dp=1", steps=2)
    pool.run(train, 1, asked)
    run = tmp_path / "run"
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(RankError, match=r"has written checkpoints .*step-00000002.*none exists now.*mount their"):
        pool.run(train, 1, resumed_config(run, ["steps=4"]), str(run))
    again = resumed_config(run, ["steps=4", f"checkpoint.path={tmp_path / 'elsewhere'}"])
    pool.run(train, 1, again, str(run))
    assert list(losses(run)) == [1, 2, 3, 4]
    assert LocalStorage(tmp_path / "elsewhere").steps() == [2, 4]


def test_a_new_run_keeps_out_of_the_checkpoints_of_another(pool, tmp_path):
    """The new run removed them one by one, and resumed from the newest of them."""
    place = str(tmp_path / "kept")
    pool.run(train, 1, config(tmp_path, "dp=1", steps=4, **{"checkpoint.path": place}))
    with pytest.raises(RankError, match=r"checkpoint\.path=.*kept has checkpoints of another run \(steps 2, 4\)"):
        pool.run(train, 1, config(tmp_path, "dp=1", steps=4, **{"checkpoint.path": place}))
    assert LocalStorage(tmp_path / "kept").steps() == [2, 4]


def test_a_run_that_is_running_is_not_resumed_beside_itself(pool, tmp_path):
    """Both would have written the same log, and removed each other's checkpoints."""
    pool.run(train, 1, config(tmp_path, "dp=1", steps=2))
    run = tmp_path / "run"
    with Run.open(run) as held:
        assert held.lock()
        before = (run / "log.jsonl").read_bytes()
        with pytest.raises(
            RankError, match=r"another process is training in the run's directory \(.*run; its log grew"
        ):
            pool.run(train, 1, resumed_config(run, ["steps=3"]), str(run))
        assert (run / "log.jsonl").read_bytes() == before
        # The lock of a node that is gone: older than any step takes.
        os.utime(run / "log.jsonl", (0, time.time() - held.config.timeout - 1))
        pool.run(train, 1, resumed_config(run, ["steps=3"]), str(run))
    pool.run(train, 1, resumed_config(run, ["steps=4"]), str(run))
    assert list(losses(run)) == [1, 2, 3, 4]


def test_a_fault_in_the_phase_of_a_save(pool, tmp_path):
    """`save` was a legal phase that no code entered."""
    inject = parse_injections(["raise:rank=0,step=4,phase=save"])
    with pytest.raises(RankError, match="injected into rank 0 in save of step 4"):
        pool.run(train_on_rank, 1, config(tmp_path, "dp=1", steps=6), True, inject)
    assert list(states(tmp_path / "run")) == [2]


def test_a_resumed_run_has_as_many_ranks_as_before(pool, tmp_path):
    """`--procs 2` was lost where no layout was set: the command that a stopped run prints resumed on one rank."""
    pool.run(train, 2, config(tmp_path, "", steps=2))
    run = tmp_path / "run"
    assert default_procs(resumed_config(run, []), str(run)) == 2
    assert default_procs(resumed_config(run, ["layout=tp=4"]), str(run / "checkpoints" / "step-00000002")) == 4
    assert default_procs(config(tmp_path, "")) == 1
