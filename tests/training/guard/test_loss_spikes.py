"""Loss spikes: found by a history that they do not move, and left behind as if their batch had never been there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import small

from echelon.checkpoint.load import open_index
from echelon.checkpoint.storage import LocalStorage
from echelon.config.run_config import Config
from echelon.config.sections import SpikeConfig
from echelon.faults import injection_spec
from echelon.launch.rank_failure import RankError
from echelon.layout import Layout, ValidationError
from echelon.training.engine import Engine
from echelon.training.guard.loss_spikes import SpikeDetector
from echelon.training.loop import train_on_rank
from echelon.training.run.batch_index import BatchIndex
from echelon.training.run.resume import resumed_config
from echelon.training.run.run_dir import Run
from echelon.training.step_result import StepResult
from echelon.training.task import LanguageModelTask
from tests.checkpoint.killed_runs import die

STEPS, AT = 12, 8
"""a run's steps, and the one whose batch is noise"""
LATE = "pp=2,schedule=2bw,accumulate=2"


def config(folder: Path, layout: str, name: str = "run", **changes: object) -> Config:
    usual = {"steps": STEPS, "checkpoint.every": 3, "checkpoint.keep": 1, "schedule.warmup": 2, "dropout": 0.1}
    usual |= {"spike.action": "rollback", "spike.window": 4, "spike.factor": 4}
    return small(folder, layout, name=name, text="ab" * 4000, **{**usual, **changes})


def train(config: Config, inject: tuple[str, ...] = (), resume: str = "", kill: int = 0) -> dict[str, object]:
    """With `kill`, the last rank dies in the second attempt at that step."""
    run, seen = Engine.step_microbatches, []

    def run_or_die(self, *args, **kwargs):
        seen.append(self.num_steps + 1)
        if kill and seen.count(kill) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            die()
        return run(self, *args, **kwargs)

    Engine.step_microbatches = run_or_die
    try:
        return train_on_rank(config, True, injection_spec.parse_injections(inject), resume).log_fields()
    finally:
        Engine.step_microbatches = run


def end_of(run: str | Path) -> tuple[str, list[int]]:
    """(hash of the last state, the batches that it has skipped)"""
    index = open_index(LocalStorage(Path(run) / "checkpoints"), STEPS)
    return index.hash, index.metadata["skipped_batches"]


def facts_of(run: str | Path) -> Mapping[str, Any]:
    return open_index(LocalStorage(Path(run) / "checkpoints"), STEPS).metadata


def losses(run: str | Path) -> dict[int, float]:
    """As they were reported last."""
    return {record["step"]: record["loss"] for record in Run.open(run).records("step")}


def records(run: str | Path, kind: str) -> list[dict[str, object]]:
    return list(Run.open(run).records(kind))


# -- which batch ------------------------------------------------------------------------------------------------------


def test_step_n_has_the_nth_batch_that_is_not_skipped():
    assert [BatchIndex().batch_of_step(step) for step in (1, 2, 3)] == [1, 2, 3]
    assert [BatchIndex([4, 1, 2]).batch_of_step(step) for step in (1, 2, 3)] == [3, 5, 6]
    batches = BatchIndex()
    for number in (7, 3, 7):
        batches.skip([number])
    kept = [number for number in range(1, 100) if number not in (3, 7)]
    assert [batches.batch_of_step(step) for step in range(1, 98)] == kept


def test_batches_may_be_added_until_they_have_been_trained_on():
    batches = BatchIndex([4, 9])
    batches.restore([4], completed_steps=7)  # batches 1 to 8 but 4
    assert batches.skipped == (4, 9)
    with pytest.raises(ValueError, match=r"data.skip_batches: 8; after step 7 the next batch is 9\)"):
        BatchIndex([8]).restore([4], completed_steps=7)


def test_dropout_masks_follow_the_step_and_tokens_the_batch(tmp_path):
    task = LanguageModelTask(config(tmp_path, "dp=1"))
    engine: Any = SimpleNamespace(row_ranges=lambda batch: iter([range(batch)]))
    (own,), (other,) = list(task.microbatches(engine, 5)), list(task.microbatches(engine, 3, 5))
    assert torch.equal(own.inputs["tokens"], other.inputs["tokens"])
    assert own.samples.tolist() == [20, 21, 22, 23]
    assert other.samples.tolist() == [12, 13, 14, 15]


# -- what is a spike --------------------------------------------------------------------------------------------------


def reported(values, **changes):
    spikes = SpikeDetector(SpikeConfig(**{"action": "rollback", "window": 4, "factor": 5.0, **changes}))
    return spikes, [spikes.observe(step, StepResult.from_values(value, 1, 1.0)) for step, value in enumerate(values, 1)]


def test_no_loss_is_a_spike_before_the_window_is_full():
    _, found = reported([3.0, 2.9, 90.0, 2.8, 2.7])
    assert found == [None] * 5
    _, found = reported([3.0, 2.9, 2.8, 2.7, 90.0])
    assert (found[-1].first, found[-1].loss, found[-1].median) == (5, 90.0, pytest.approx(2.85))


def test_a_spike_does_not_move_its_history():
    """With mean and standard deviation, the first of these would hide the second."""
    spikes, found = reported([3.0, 2.9, 2.8, 2.7, 90.0, 9.0, 2.6])
    assert [spike.first for spike in found if spike] == [5, 6]
    assert list(spikes.recent_losses) == [2.9, 2.8, 2.7, 2.6]


def test_ripples_of_a_flat_curve_are_no_spikes():
    _, found = reported([2.0, 2.0, 2.0, 2.0, 2.1, 2.0, 2.3])
    assert [spike.first for spike in found if spike] == [7]


def test_falling_losses_and_skipped_steps_are_no_spikes():
    spikes, found = reported([9.0, 8.0, 6.0, 5.0, 4.0, float("nan"), 3.0])
    assert found == [None] * 7
    assert list(spikes.recent_losses) == [6.0, 5.0, 4.0, 3.0]


def test_the_loss_history_is_restored_on_resume():
    spikes, _ = reported([3.0, 2.9, 2.8, 2.7])
    other = SpikeDetector(spikes.config)
    other.load_state_dict(json.loads(json.dumps(spikes.state_dict())))
    assert (
        other.observe(5, StepResult.from_values(9.0, 1, 1.0))
        == spikes.observe(5, StepResult.from_values(9.0, 1, 1.0))
        is not None
    )


def test_rollbacks_since_a_checkpoint_stay_counted():
    """A rollback loads a checkpoint that knows of fewer: a run must not roll back without end."""
    spikes, _ = reported([3.0, 2.9, 2.8, 2.7])
    saved = spikes.state_dict()
    spikes.rollbacks = 2
    spikes.load_state_dict(saved)
    assert spikes.rollbacks == 2
    spikes.load_state_dict({**saved, "rollbacks": 3})
    assert spikes.rollbacks == 3


# -- the way back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "at", "lost"),
    [("dp=2,zero=1", AT, 2), ("pp=2,accumulate=2", AT, 2), (LATE, AT, 3), (LATE, 9, 3)],
    ids=["dp", "pp", "reported later", "and saved"],
)
def test_a_rolled_back_run_equals_one_that_never_saw_the_batch(pool, tmp_path, layout, at, lost):
    """If steps are logged one late, the one after the spike is lost too; not where a checkpoint is due, which is not
    written before the spike is known."""
    changes = {"spike.window": 7, "spike.factor": 1, **({"tied": "false"} if layout == LATE else {})}
    world = Layout.parse(layout).world
    struck = pool.run(train, world, config(tmp_path, layout, "struck", **changes), (f"spike:step={at}",))[0]
    never = pool.run(train, world, config(tmp_path, layout, "never", **{"data.skip_batches": [at], **changes}))[0]
    assert [record["after"] for record in records(struck["run"], "rollback")] == [6]
    assert not records(never["run"], "rollback")
    assert losses(struck["run"]) == losses(never["run"])
    assert end_of(struck["run"]) == end_of(never["run"])
    assert end_of(struck["run"])[1] == [at]
    history = [facts_of(reported["run"])["spikes"]["losses"] for reported in (struck, never)]
    assert history[0] == history[1] == [losses(never["run"])[step] for step in range(STEPS - 6, STEPS + 1)]
    assert (struck["time"]["lost_steps"], struck["time"]["restarts"]) == (lost, 0)
    assert next(r["batch"] for r in records(struck["run"], "step")[::-1] if r["step"] == at) == at + 1


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "tp=2"])
def test_a_run_killed_after_a_rollback_resumes(pool, tmp_path, layout):
    """The batch is fine when it is looked at again: only the checkpoint knows that it was skipped."""
    asked = config(tmp_path, "dp=2,zero=1", "struck")
    with pytest.raises(RankError):
        pool.run(train, 2, asked, (f"spike:step={AT}",), "", AT)
    run = tmp_path / "struck"
    assert LocalStorage(run / "checkpoints").steps() == [6]
    pool.run(train, 2, resumed_config(run, [f"layout={layout}"]), (), str(run))
    never = pool.run(train, 2, config(tmp_path, "dp=2,zero=1", "never", **{"data.skip_batches": [AT]}))[0]
    assert losses(run) == pytest.approx(losses(never["run"]), rel=1e-4)
    assert end_of(run)[1] == [AT]
    if layout.startswith("dp"):
        assert end_of(run) == end_of(never["run"])


def test_several_batches_are_skipped_and_rollbacks_are_limited(tmp_path):
    asked = config(tmp_path, "dp=1", **{"spike.skip": 3, "spike.rollbacks": 1})
    with pytest.raises(ValueError, match=r"loss .* of step 11 is a spike .*rolled back 1 time\(s\) already"):
        train(asked, (f"spike:step={AT}", "spike:step=11"))
    (back,) = records(tmp_path / "run", "rollback")
    assert back["skipped_batches"] == [8, 9, 10]
    assert [record["first"] for record in records(tmp_path / "run", "spike")] == [8, 11]


def test_a_warning_changes_nothing(tmp_path):
    warned = train(config(tmp_path, "dp=1", "warned", **{"spike.action": "warn"}), (f"spike:step={AT}",))
    plain = config(tmp_path, "dp=1", "plain", **{"spike.action": "warn", "spike.factor": 1e9})
    assert [record["first"] for record in records(warned["run"], "spike")] == [AT]
    assert losses(warned["run"]) == losses(train(plain, (f"spike:step={AT}",))["run"])


def test_nonfinite_steps_count_as_one_spike(tmp_path, monkeypatch):
    """Three in a row end a run that cannot go back. This one skips their batches, and the weights are well again."""
    asked = config(tmp_path, "dp=1", **{"precision.skips": 3})
    run, attempts = Engine.step_microbatches, []

    def poisoned(self, microbatches, **kwargs):
        attempts.append(self.num_steps + 1)
        if len(attempts) >= AT and attempts.count(self.num_steps + 1) == 1 and self.num_steps + 1 < AT + 3:
            self.normalizer.last_num_targets.fill_(0.0)  # backward starts from infinity
        return run(self, microbatches, **kwargs)

    monkeypatch.setattr(Engine, "step_microbatches", poisoned)
    train_on_rank(asked, True)
    (back,) = records(tmp_path / "run", "rollback")
    assert (back["after"], back["skipped_batches"]) == (6, [8, 9, 10])
    assert end_of(tmp_path / "run")[1] == [8, 9, 10]
    monkeypatch.undo()
    never = train_on_rank(config(tmp_path, "dp=1", "never", **{"data.skip_batches": [8, 9, 10]}), True)
    assert end_of(tmp_path / "run") == end_of(never.run)


def test_rollback_requires_checkpoints(tmp_path):
    with pytest.raises(ValidationError, match="has no checkpoint to roll back to"):
        config(tmp_path, "dp=1", **{"checkpoint.every": 0, "checkpoint.keep": 2})
    with pytest.raises(ValidationError, match=r"spike.skip=2 has no effect with spike.action=warn"):
        config(tmp_path, "dp=1", **{"spike.action": "warn", "spike.skip": 2})
