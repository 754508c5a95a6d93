"""A run says before it begins what it will take, and at its end what it took."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from echelon import data
from echelon.config.run_config import Config
from echelon.config.sections import DataConfig, EvalConfig, SampleConfig
from echelon.launch.world import World
from echelon.layout import Layout
from echelon.layout.mesh import DEFAULT_ORDER
from echelon.models import model_config
from echelon.planning.calibrate.correction import MEASURED_FILE, read_correction
from echelon.training.loop import train_on_rank
from echelon.training.run import prediction
from echelon.training.run.run_dir import Run


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    return str(data.prepare_token_file(folder, folder / "cache", tokenizer=data.load_tokenizer("bytes")))


def config(tokens, folder, **changes):
    fixed = {"seq_len": 32, "batch": 4, "steps": 3, "run": str(folder / "run")}
    off = {"eval": EvalConfig(every=0), "sample": SampleConfig(tokens=0)}
    return Config(data=DataConfig(path=(tokens,)), **{**fixed, **off, **changes})


@pytest.mark.parametrize("layout", ["dp=2", "pp=2,accumulate=2", "tp=2"])
def test_predicted_and_measured_step_times_are_written(pool, tokens, tmp_path, layout):
    summary, _ = pool.run(train_on_rank, 2, config(tokens, tmp_path, layout=layout), True)
    run = Run.open(summary.run)
    before = run.plan["predicted"]
    measured = json.loads((run.path / MEASURED_FILE).read_text())
    assert before["step_s"] > 0
    assert before["memory_bytes"] > 0
    assert measured["predicted"] == before
    steps = [record["seconds"] for record in run.records("step")]
    assert min(steps[1:]) <= measured["step_s"]
    assert measured["memory_bytes"] > 0
    assert read_correction(summary.run) == measured["step_s"] / before["step_s"]


def test_a_run_that_is_not_priced_has_a_reason(pool, tokens, tmp_path):
    summary, _ = pool.run(train_on_rank, 2, config(tokens, tmp_path, layout="dp=2", dtype="float64"), True)
    run = Run.open(summary.run)
    assert run.plan["predicted"] == {"reason": "the planner does not price float64 GEMMs"}
    assert json.loads((run.path / MEASURED_FILE).read_text())["ratio"] is None


def test_a_planner_that_fails_does_not_fail_the_run(tokens, tmp_path, monkeypatch, capsys):
    def broken(case):
        raise ZeroDivisionError("a bug in the planner")

    monkeypatch.setattr(prediction, "price", broken)
    summary = train_on_rank(config(tokens, tmp_path))
    reason = Run.open(summary.run).plan["predicted"]["reason"]
    assert reason == "the planner gave up (a bug in the planner)"
    assert "s a step; not predicted: the planner gave up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "precision", "moment_bytes", "program"),
    [
        (["dtype=bfloat16"], "bf16", 4, "echelon"),
        (["dtype=bfloat16", "precision.compute=fp8"], "fp8", 4, "echelon"),
        (["dtype=bfloat16", "precision.compute=fp8-row", "optimizer.states=bfloat16"], "fp8", 2, "echelon"),
        (["dtype=bfloat16", "kernels=plain"], "bf16", 4, "plain"),
        ([], "fp32", 4, "echelon"),
    ],
)
def test_the_dtypes_of_a_run_are_priced(monkeypatch, settings, precision, moment_bytes, program):
    asked = []

    def keep(case):
        asked.append(case)
        raise ValueError("enough")

    monkeypatch.setattr(prediction, "price", keep)
    here = World(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    layout = Layout(recompute="ops")
    found = prediction.predict_run(
        Config.load(None, settings), layout, model_config.find_model("llama-tiny"), here, threads=1
    )
    assert found == {"reason": "the planner gave up (enough)"}
    (case,) = asked
    assert (case.precision, case.moment_bytes, case.program) == (precision, moment_bytes, program)
    assert case.layout == layout


def agreed_rank_order(local_world_size: int) -> tuple[str, str]:
    """The order that this rank learns, if the planner of each machine would choose another one."""
    planned = DEFAULT_ORDER[::-1] if dist.get_rank() == 0 else DEFAULT_ORDER
    world = World(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"), backend="gloo")
    model, layout = model_config.find_model("llama-tiny"), Layout.parse("dp=2,pp=2,accumulate=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
        patch.setattr(prediction, "place_ranks", lambda scenario: replace(scenario, rank_order=planned))
        return prediction.agree_on_rank_order(Config(batch=4), layout, model, world)


def test_all_nodes_agree_on_the_rank_order_of_rank_0(pool):
    assert pool.run(agreed_rank_order, 4, local_world_size=2) == [DEFAULT_ORDER[::-1]] * 4
    assert pool.run(agreed_rank_order, 4, local_world_size=4) == [DEFAULT_ORDER] * 4  # one node: nothing to plan


def test_the_summary_has_predicted_and_measured_step_time(tokens, tmp_path, capsys):
    train_on_rank(config(tokens, tmp_path))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("step: "))
    assert "predicted " in line
    assert " s a step, measured " in line
