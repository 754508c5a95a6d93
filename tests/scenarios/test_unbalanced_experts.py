"""8 experts, 2 for a token, ep 1, 2 and 4. All tokens go to one expert; an expert is never chosen; a stage has no
experts at all. Nothing hangs, gradients are equal, and the log has the load, the dead experts and the exact drops."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_engines import batch_of, tiny
from typer.testing import CliRunner

from echelon import models
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.models.moe_config import MoEConfig
from echelon.moe.gates.gate import Gate
from echelon.report.expert_load_history import ExpertLoadHistory
from echelon.training.loop import train_on_rank
from echelon.training.run.run_dir import Run
from echelon.verification.verifier import verify

EXPERTS, CHOICES, BATCH, LENGTH, STEPS = 8, 2, 4, 16, 3
FAVOURITE, NEVER = 5, 2
FACTOR = 0.75
"""capacity for three quarters of all choices: a quarter is dropped even under balanced load"""
LAYOUTS = ("dp=1", "dp=2,ep=2", "dp=4,ep=4", "dp=2,tp=2,ep=4", "dp=2,pp=2,ep=2")


def crowded():
    """Every token goes to the favourite, and to a second one; one expert is never chosen."""
    model = models.build(shape("loss-free"), dtype=torch.float64, seed=3)
    for gate in gates(model):
        gate.bias[FAVOURITE], gate.bias[NEVER] = 1e6, -1e6
    return model


def tight():
    """Experts with little capacity, in the second layer only: the first of two stages has no experts."""
    return models.build(
        shape("mixtral", dense_layers=1, options=(("capacity_factor", FACTOR),)), dtype=torch.float64, seed=3
    )


def shape(gate, **options):
    return tiny("llama", moe=MoEConfig(experts=EXPERTS, k=CHOICES, ffn=12, gate=gate, **options))


def gates(model):
    return [part for part in model.modules() if isinstance(part, Gate)]


def batch(rows, step):
    return batch_of(shape("mixtral"), rows, length=LENGTH, seed=step)


@pytest.mark.parametrize("model", [crowded, tight], ids=lambda model: model.__name__)
def test_gradients_are_equal_and_nothing_hangs(pool, model):
    report = verify(model, "; ".join(LAYOUTS[1:]), batch=batch, pool=pool, steps=2)
    assert report.passed, [verdict.trouble or verdict.first_difference for verdict in report.verdicts]


def trained(pool, model, layout, folder):
    """The run of a real training, whose steps are too small to change what the router sees."""
    config = Config(
        model=f"{__file__}:{model.__name__}",
        layout=layout,
        batch=BATCH,
        steps=STEPS,
        dtype="float64",
        optimizer=OptimizerConfig(lr=1e-30),
        run=str(folder / layout.replace(",", "-")),
    )
    first, *_ = pool.run(train_on_rank, Layout.parse(layout).world, config, True)
    return Run.open(first.run), first


def logged(run):
    return [record["layers"] for record in run.records("experts")]


def test_one_expert_for_all_and_one_for_none_are_in_the_log(pool, tmp_path):
    truth = None
    for layout in LAYOUTS:
        run, summary = trained(pool, crowded, layout, tmp_path)
        found = logged(run)
        truth = truth or found
        assert found == truth, layout
        assert len(found) == STEPS
        for layer in (layer for step in found for layer in step):
            assert layer["counts"][FAVOURITE] == BATCH * LENGTH
            assert layer["counts"][NEVER] == 0
            assert layer["dead"] == layer["counts"].count(0) >= 1
            assert layer["most"] == EXPERTS / CHOICES
            assert (sum(layer["counts"]), layer["dropped"]) == (CHOICES * BATCH * LENGTH, 0)
        assert all(NEVER in layer.unused_experts() for layer in ExpertLoadHistory.read(run.path).layers)
        assert (summary.experts["most"], summary.experts["dropped_in_run"]) == (EXPERTS / CHOICES, 0)


def counted(step):
    """(tokens of each expert, drops) of a step by hand: sequence by sequence, token by token, choice by choice."""
    model, seen = tight().train(), []
    (gate,) = gates(model)
    gate.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model(**batch(BATCH, step))
    (x,) = seen
    loads, dropped = [0] * EXPERTS, 0
    for sequence in x:
        room = [math.ceil(FACTOR * CHOICES * LENGTH / EXPERTS)] * EXPERTS
        for token in sequence:
            scores = (gate.weight @ token).tolist()
            for expert in sorted(range(EXPERTS), key=lambda expert: -scores[expert])[:CHOICES]:
                loads[expert] += 1
                dropped += room[expert] == 0
                room[expert] -= room[expert] > 0
    return loads, dropped


def test_exact_drops_are_in_the_log_and_a_stage_without_experts_is_no_obstacle(pool, tmp_path):
    expected = [counted(step) for step in range(STEPS)]
    assert all(dropped >= CHOICES * BATCH * LENGTH // 4 for _, dropped in expected)
    for layout in LAYOUTS:
        run, summary = trained(pool, tight, layout, tmp_path)
        found = [(layer["counts"], layer["dropped"]) for (layer,) in logged(run)]
        assert found == expected, layout
        assert summary.experts["dropped"] == expected[-1][1]
        assert summary.experts["dropped_in_run"] == sum(dropped for _, dropped in expected)


def test_the_command_line_reports_the_same(tmp_path):
    keys = {"batch": BATCH, "steps": STEPS, "dtype": "float64", "optimizer.lr": 1e-30}
    keys |= {"model": f"{__file__}:tight", "run": tmp_path / "run", "device": "cpu"}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    shown = CliRunner().invoke(app, ["train", *settings, "--json"])
    assert shown.exit_code == 0, shown.output
    found, expected = json.loads(shown.stdout)["experts"], [counted(step) for step in range(STEPS)]
    assert found["dropped_in_run"] == sum(dropped for _, dropped in expected)
    loads, dropped = expected[-1]
    assert (found["most"], found["dead"]) == (max(loads) * EXPERTS / sum(loads), loads.count(0))
    assert (found["dropped"], found["assigned"]) == (dropped, sum(loads))
    shown = CliRunner().invoke(app, ["train", *settings])
    assert f"dropped {100 * dropped / sum(loads):.1f} % (blocks.1)" in shown.stdout
    shown = CliRunner().invoke(app, ["draw", str(tmp_path / "run"), "--json"])
    (layer,) = json.loads(shown.stdout)["experts"]["layers"]
    assert (layer["layer"], layer["dropped_in_run"]) == ("blocks.1.mlp", found["dropped_in_run"])
