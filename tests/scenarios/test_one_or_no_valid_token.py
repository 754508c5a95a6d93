"""One valid token, on one rank, in one microbatch; and no valid token at all."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_engines import batch_of, engine_of, largest_error, one_device, tiny, whole

from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.training import start_training
from echelon.training.run.run_dir import Run

SHAPE = tiny("gpt", tied=True)
LAYOUTS = (
    "dp=2,accumulate=2",
    "dp=2,zero=3,accumulate=2",
    "dp=4,zero=2",
    "tp=2,accumulate=4",
    "dp=2,tp=2,zero=1",
    "pp=2,accumulate=4",
    "dp=2,pp=2,schedule=zb-h1,accumulate=2",
)
ADAMW = OptimizerConfig(lr=1e-2)


def with_one_target(row, column):
    batch = batch_of(SHAPE, 4)
    kept = batch["targets"][row, column].clone()
    batch["targets"].fill_(-100)
    batch["targets"][row, column] = kept
    return batch


def on_a_layout(layout, row, column):
    engine = engine_of(SHAPE, layout)
    result = engine.step(with_one_target(row, column))
    return result, whole(engine.parallel)


@pytest.mark.parametrize(("row", "column"), [(3, 8), (0, 0)], ids=["last", "first"])
def test_one_valid_token_counts_as_much_as_on_one_device(pool, row, column):
    model = one_device(SHAPE)
    total, count = model(**with_one_target(row, column))
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert int(count) == 1
    for layout in LAYOUTS:
        for result, found in pool.run(on_a_layout, Layout.parse(layout).world, layout, row, column):
            assert result.loss == pytest.approx(total.item(), abs=1e-10), layout
            assert (result.count, result.skipped) == (1, False)
            assert largest_error(found, gradients) < 1e-10, layout


def without_a_target(layout):
    """One real step, so that there are moments; then one without any target."""
    engine = engine_of(SHAPE, layout, optimizer=ADAMW)
    engine.step(batch_of(SHAPE, 4))
    batch = batch_of(SHAPE, 4)
    batch["targets"].fill_(-100)
    states = []
    for step in range(2):
        if step:
            result = engine.step(batch)
        weights = [unit.master.values() for unit in engine.parallel.sharded_model.param_groups]
        states.append([t.clone() for t in [*engine.optimizer.states(), *weights]])
    return result, len(states[0]), all(torch.equal(*pair) for pair in zip(*states, strict=True))


@pytest.mark.parametrize("layout", ["dp=2,accumulate=2", "dp=2,zero=3", "dp=2,tp=2,zero=1"])
def test_no_valid_token_is_a_reported_no_op(pool, layout):
    for result, num_tensors, equal in pool.run(without_a_target, Layout.parse(layout).world, layout):
        assert result.skipped
        assert (result.loss, result.norm, result.count) == (0.0, 0.0, 0)
        assert num_tensors > 3
        assert equal, "weights, moments and their step counts are bit-equal"


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
    def forward(self, x, valid):
        return (self.net(x)[:, 0] * valid).sum(), valid.sum()

def build():
    return Model()

def batch(rows, step):
    return {"x": torch.ones(rows, 3), "valid": torch.full((rows,), 0.0 if step == 1 else 1.0)}
"""


def test_the_log_and_the_console_report_the_skipped_step(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    summary = start_training.run_training(
        Config(model=f"{tmp_path / 'own.py'}:build", steps=3, batch=4, run=str(tmp_path / "run"))
    )
    steps = list(Run.open(summary.run).records("step"))
    assert [step["skipped"] for step in steps] == [False, True, False]
    assert [step["count"] for step in steps] == [4, 0, 4]
    assert "note: step 2 had no valid target: nothing was updated" in capsys.readouterr().out
    assert "NaN" not in json.dumps(steps)
