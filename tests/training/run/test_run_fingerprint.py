"""A run does not continue on other data, with another model, or on ranks that differ."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import NUMBERS, small

from echelon.config.run_config import Config
from echelon.launch.rank_failure import RankError
from echelon.models.layers import check_loss_output
from echelon.models.model_config import ModelConfig, find_model
from echelon.models.model_dir import MODEL_FILE, SavedModel
from echelon.training import task
from echelon.training.loop import train_on_rank
from echelon.training.loop_callbacks import StopOnSignal
from echelon.training.run.resume import resumed_config
from echelon.training.run.run_fingerprint import (
    RunFingerprint,
    batch_fingerprint,
    compare_with_checkpoint,
    model_fields,
)
from echelon.training.step_result import StepResult

MODEL = replace(find_model("llama-tiny"), layers=1, theta=10000.0)


def write_model(folder: Path, model: ModelConfig) -> str:
    """The directory of an imported model."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / MODEL_FILE).write_text(json.dumps(SavedModel(config=model).to_json()))
    return str(folder / "model")


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run of two steps with a checkpoint, of a model in a directory."""
    folder = tmp_path_factory.mktemp("run")
    given = {"steps": 2, "checkpoint.every": 2, "model": write_model(folder, MODEL)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "TOKEN_CACHE_DIR", folder / "cache")
        patch.setattr(task, "is_model_dir", lambda path: False)  # the directory has no weights
        train_on_rank(small(folder, "dp=1", **given), True)
        yield folder


def resume(folder: Path) -> str:
    """Resumes for one more step; what it printed about the checkpoint."""
    config = resumed_config(folder / "run", ["steps=3", "checkpoint.every=0"])
    return train_on_rank(config, True, resume=str(folder / "run")).run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"theta": 5e5}, "theta is 500000.0, was 10000.0"),
        ({"epsilon": 1e-6}, "epsilon is 1e-06, was 1e-05"),
    ],
)
def test_a_changed_model_file_is_refused(saved_run, changes, words):
    write_model(saved_run, replace(MODEL, **changes))
    try:
        with pytest.raises(ValueError, match="the model has changed since the checkpoint was written") as error:
            resume(saved_run)
    finally:
        write_model(saved_run, MODEL)
    assert words in str(error.value)


def test_changed_text_is_refused_and_restored_text_resumes(saved_run):
    text = saved_run / "text.txt"
    text.write_text(NUMBERS.replace("7 and", "8 and"))
    with pytest.raises(ValueError, match=r"the data has changed since the checkpoint was written \(data fingerprint"):
        resume(saved_run)
    text.write_text(NUMBERS)  # with another time: the content counts
    assert resume(saved_run) == str(saved_run / "run")


def test_fingerprints_compare_every_field():
    model = model_fields(find_model("deepseek-tiny"))
    current = RunFingerprint(data="d", model=model)
    saved = json.loads(json.dumps(current.to_json()))
    assert compare_with_checkpoint(saved, current, model="m") == []
    changed = replace(find_model("deepseek-tiny"), moe=replace(find_model("deepseek-tiny").moe, experts=64))
    with pytest.raises(ValueError, match=r"moe\.experts is 64, was "):
        compare_with_checkpoint(saved, replace(current, model=model_fields(changed)), model="m")
    # A field that the earlier version did not have is no change.
    del saved["model"]["qk_norm"]
    assert compare_with_checkpoint(saved, current, model="m") == []
    (note,) = compare_with_checkpoint(None, current, model="m")
    assert "not compared" in note
    (note,) = compare_with_checkpoint(saved, replace(current, source="new"), model="mine.py:make")
    assert note == "the file of the model has changed since the checkpoint was written (mine.py)"
    for damaged in ([], "text", {"model": 3}, {}):
        with pytest.raises(ValueError, match="damaged"):
            compare_with_checkpoint(damaged, current, model="m")


def test_batch_fingerprints():
    batch = {"x": torch.ones(4, 3, device="cpu"), "y": torch.zeros(4, dtype=torch.bool)}
    assert batch_fingerprint(batch) == batch_fingerprint(dict(reversed(batch.items())))
    other = [
        {**batch, "x": batch["x"].double()},
        {**batch, "x": batch["x"].t().contiguous()},
        {**batch, "y": ~batch["y"]},
        {"x": batch["x"]},
    ]
    assert batch_fingerprint(batch) not in {batch_fingerprint(one) for one in other}
    assert batch_fingerprint({"x": torch.zeros(0, dtype=torch.bfloat16)}) < 2**53
    assert batch_fingerprint(batch, 1.0) != batch_fingerprint(batch)
    large, first = {"x": torch.zeros(200_000)}, batch_fingerprint({"x": torch.zeros(200_000)}, sampled=True)
    large["x"][::7] = 1
    assert batch_fingerprint(large, sampled=True) != first


MODULE = """
import os
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x).square().sum(), NUM_TARGETS

def factory():
    return Linear()

def batch(rows, step):
    return {"x": torch.full((rows, 3), step + OWN_RANK)}
"""


def write_module(folder: Path, num_targets: str, own_rank: str = "1.0") -> str:
    path = folder / "mine.py"
    path.write_text(MODULE.replace("NUM_TARGETS", num_targets).replace("OWN_RANK", own_rank))
    return f"{path}:factory"


def of_module(folder: Path, model: str, layout: str) -> Config:
    return Config(model=model, layout=layout, batch=4, steps=1, device="cpu", run=str(folder / "run"))


@pytest.mark.parametrize("num_targets", [-3, 2.5, float("nan"), float("inf")])
def test_an_invalid_number_of_targets_is_refused(num_targets):
    """At once on the CPU; on a device, where reading it would wait, it becomes NaN until the result is read."""
    with pytest.raises(ValueError, match="invalid number of valid targets"):
        check_loss_output((torch.zeros(()), num_targets))
    later = torch.device("cuda" if torch.cuda.is_available() else "meta")
    _, count = check_loss_output((torch.zeros(()), torch.tensor(num_targets, device=later)))
    count = count.item() if later.type == "cuda" else float("nan")
    with pytest.raises(ValueError, match="invalid number of valid targets"):
        StepResult.from_values(1.0, count, 1.0).wait()


def test_valid_numbers_of_targets():
    for num_targets in (3, 0, 2.0, torch.tensor([4]), torch.tensor(True)):
        assert check_loss_output((torch.zeros(()), num_targets))[1] == num_targets
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\)"):
        check_loss_output((torch.zeros(()), torch.ones(2)))


def test_a_run_with_a_negative_number_of_targets_ends(tmp_path):
    model = write_module(tmp_path, "-3")
    with pytest.raises(ValueError, match=r"invalid number of valid targets \(-3\); return an integer"):
        train_on_rank(of_module(tmp_path, model, "dp=1"), True)


def test_a_user_batch_that_differs_between_ranks_is_refused(pool, tmp_path):
    model = write_module(tmp_path, "len(x)", "1.0 * torch.distributed.get_rank()")
    with pytest.raises(RankError, match=r"returned another batch on rank 1 than on rank 0 \(by step 1\)"):
        pool.run(train_on_rank, 2, of_module(tmp_path, model, "dp=2"), True)


@pytest.mark.parametrize(("step", "steps", "reported"), [(4, 12, 11), (11, 12, 12)])
def test_one_other_batch_is_noticed_at_the_next_comparison(pool, tmp_path, step, steps, reported):
    model = write_module(tmp_path, "len(x)", f"1.0 * torch.distributed.get_rank() * (step == {step})")
    config = replace(of_module(tmp_path, model, "dp=2"), steps=steps)
    with pytest.raises(RankError, match=rf"returned another batch on rank 1 than on rank 0 \(by step {reported}\)"):
        pool.run(train_on_rank, 2, config, True)


def in_a_folder_of_its_own(folder: Path) -> None:
    """Each rank reads another text, as on machines with disks of their own."""
    rank = torch.distributed.get_rank()
    (folder / str(rank)).mkdir()
    task.TOKEN_CACHE_DIR = folder / str(rank)
    train_on_rank(small(folder / str(rank), "dp=2", text=NUMBERS + str(rank), steps=1), True)


def test_ranks_with_other_data_are_refused(pool, tmp_path):
    with pytest.raises(RankError, match="rank 1 has data that differs from that of rank 0"):
        pool.run(in_a_folder_of_its_own, 2, tmp_path)


def test_a_run_whose_folder_is_removed_ends_with_an_error(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopOnSignal, "before_step", lambda self, step: shutil.rmtree(tmp_path / "run", True))
        with pytest.raises(ValueError, match=r"cannot write the run .*log.jsonl: the file was removed while"):
            train_on_rank(small(tmp_path, "dp=1", steps=2), True)
