"""Fp16, an infinite gradient on one rank: all ranks skip the step together, and name the rank and tensor."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_engines import batch_of, tiny

from echelon import models
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig, PrecisionConfig
from echelon.layout import Layout
from echelon.models.moe_config import MoEConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from echelon.training import start_training
from echelon.training.engine import Engine
from echelon.training.run.run_dir import Run

SHAPE = tiny("llama")
EXPERTS = tiny("llama", moe=MoEConfig(experts=4, k=2, ffn=12, gate="mixtral"))
START = 2.0**10
DOWN = "blocks.1.mlp.down.weight"


def poison(engine: Engine, name: str, steps: tuple[int, ...], on: dict[str, int], value: float = math.inf) -> None:
    """The gradient of one parameter has one bad element in some steps, on the ranks at these coordinates."""
    if any(engine.parallel.axes.coordinates[axis] != index for axis, index in on.items()):
        return
    for unit in engine.parallel.sharded_model.param_groups:

        def arrive(entry, gradient, arrive=unit.grads.accumulate):
            if entry.name == name and engine.num_steps in steps:
                gradient = gradient.clone()
                gradient.view(-1)[0] = value
            arrive(entry, gradient)

        unit.grads.accumulate = arrive


def states(engine: Engine) -> list[torch.Tensor]:
    masters = [unit.master.values() for unit in engine.parallel.sharded_model.param_groups]
    return [tensor.clone() for tensor in (*masters, *engine.optimizer.states())]


def steps_of(layout, name, on, shape=SHAPE, rule="adamw", compute=torch.float16):
    """On a rank: a good step, a bad one, and a good one."""
    rule = OptimizerConfig(name=rule, lr=1e-2, **({"momentum": 0.9} if rule == "sgd" else {}))
    scale = LossScale.dynamic(start=START, every=2)
    engine = Engine(
        models.build(shape, "meta"), layout, rule, options=ParallelOptions(compute_dtype=compute), loss_scale=scale
    )
    engine.model.train()
    poison(engine, name, (1,), on)
    reported = []
    for step in range(4):
        before = states(engine)
        result = engine.step(batch_of(shape, 4, seed=step))
        found = engine.locate_nonfinite(result)
        after = states(engine)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        reported.append((result.skipped, same, result.loss_scale, result.next_loss_scale, str(found)))
    return reported


def around_a_bad_step(layout, shape, rule):
    """On a rank: whether a bad step left the EMA and the gate biases unchanged, and a good one did not."""
    options, scale = ParallelOptions(compute_dtype=torch.float16), LossScale.dynamic(start=START)
    engine = Engine(models.build(shape, "meta"), layout, rule, options=options, loss_scale=scale)
    engine.model.train()
    poison(engine, "blocks.0.attn.q.weight", (1,), {})
    found = []
    for step in range(3):
        before = [tensor.clone() for tensor in (*engine.ema.states(), *engine.model.buffers())]
        engine.step(batch_of(shape, 4, seed=step))
        after = [*engine.ema.states(), *engine.model.buffers()]
        found.append([torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    averages = len(engine.ema.states())
    return [(all(same[:averages]), all(same[averages:])) for same in found]


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,ep=2"])
def test_a_skipped_step_changes_neither_ema_nor_gate_biases(pool, layout):
    shape = tiny("llama", moe=MoEConfig(experts=4, k=2, ffn=12, gate="loss-free"))
    for reported in pool.run(around_a_bad_step, 2, layout, shape, OptimizerConfig(lr=1e-2, ema=0.9)):
        assert reported == [(False, False), (True, True), (False, False)]


WHERE = {
    "tp=2": ({"tp": 1}, "rank 1 (tp 1)"),
    "pp=2,accumulate=2": ({"pp": 1}, "rank 1 (pp 1)"),
    "pp=2,accumulate=2,schedule=zb-h1": ({"pp": 1}, "rank 1 (pp 1)"),
    "dp=2,tp=2,zero=1": ({"dp": 1, "tp": 1}, "rank 3 (dp 1, tp 1), which holds its sum over data-parallel ranks"),
    "cp=2": ({"cp": 1}, "rank 0 (cp 0) and 1 more, which hold its sum over data-parallel ranks"),
    "dp=2,accumulate=2": ({"dp": 1}, "rank 0 (dp 0) and 1 more, which hold its sum over data-parallel ranks"),
    "offload=optimizer": ({}, "rank 0"),
    "dp=2,accumulate=2,zero=1,offload=params": ({"dp": 1}, "rank "),
    **{f"dp=2,accumulate=2,zero={zero}": ({"dp": 1}, "rank ") for zero in (1, 2, 3)},
}


@pytest.mark.parametrize("layout", WHERE)
def test_all_ranks_skip_the_step_and_name_the_tensor(pool, layout):
    on, where = WHERE[layout]
    ranks = pool.run(steps_of, Layout.parse(layout).world, layout, DOWN, on)
    for reported in ranks:
        assert [skipped for skipped, *_ in reported] == [False, True, False, False]
        assert [same for _, same, *_ in reported] == [False, True, False, False], (
            "weights, moments and their count stay"
        )
        scales = [(before, after) for *_, before, after, _ in reported]
        half = START / 2
        assert scales == [(START, START), (START, half), (half, half), (half, START)], "halves, and doubles after two"
        assert [words for *_, words in reported] == [reported[0][-1], reported[1][-1], "None", "None"]
        assert reported[1][-1].startswith(f"gradient of {DOWN} not finite on {where}")
    assert all(reported == ranks[0] for reported in ranks), "everybody knows the same"


@pytest.mark.parametrize("layout", ["dp=1,accumulate=2", "tp=2"])
def test_sgd_skips_the_step_too(pool, layout):
    for reported in pool.run(steps_of, Layout.parse(layout).world, layout, DOWN, {"tp": 0}, SHAPE, "sgd"):
        assert [same for _, same, *_ in reported] == [False, True, False, False]


def test_non_finite_expert_gradients_are_found_on_their_rank(pool):
    name = "blocks.0.mlp.experts.down"
    ranks = pool.run(steps_of, 2, "dp=2,ep=2", name, {"dp": 1}, EXPERTS)
    for reported in ranks:
        assert [skipped for skipped, *_ in reported] == [False, True, False, False]
        assert reported[1][-1] == f"gradient of {name} not finite on rank 1 (dp 1)"


def unscaled(layout, compute, value):
    """Two bad updates, without a loss scale."""
    engine = Engine(
        models.build(SHAPE, "meta"), layout, options=ParallelOptions(compute_dtype=compute, master_dtype=compute)
    )
    poison(engine, "norm.weight", (0,), {"pp": engine.layout.pp - 1}, value)
    result = engine.step(batch_of(SHAPE, 4))
    engine.drain()
    moments = all(bool(state.isfinite().all()) for state in engine.optimizer.states())
    weights = all(bool(unit.master.values().isfinite().all()) for unit in engine.parallel.sharded_model.param_groups)
    return result.skipped, result.finite, moments, weights, str(engine.locate_nonfinite(result))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("layout", ["dp=1", "pp=2,accumulate=2,schedule=2bw", "pp=2,accumulate=2,schedule=pipedream"])
def test_non_finite_gradients_never_reach_low_precision_moments(pool, layout, value):
    for skipped, finite, *states, words in pool.run(unscaled, Layout.parse(layout).world, layout, torch.float64, value):
        assert (skipped, finite) == (True, False)
        assert states == [True, True]
        assert words.startswith("gradient of norm.weight not finite on rank")


def fixed(layout):
    """A pipeline that updates as it goes, with a scale and without: the same weights."""
    found = []
    for scale in (LossScale(), LossScale(start=64.0)):
        options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
        engine = Engine(models.build(SHAPE, "meta"), layout, options=options, loss_scale=scale)
        for step in range(3):
            result = engine.step(batch_of(SHAPE, 4, seed=step))
        engine.drain()
        found.append((result.norm, [unit.master.values() for unit in engine.parallel.sharded_model.param_groups]))
    (norm, weights), (scaled_norm, scaled) = found
    return norm - scaled_norm, max(float((a - b).abs().max()) for a, b in zip(weights, scaled, strict=True))


@pytest.mark.parametrize("layout", ["pp=2,accumulate=2,schedule=2bw", "pp=2,accumulate=2,schedule=pipedream"])
def test_a_fixed_scale_is_divided_out_of_asynchronous_updates(pool, layout):
    for norm, weights in pool.run(fixed, 2, layout):
        assert abs(norm) < 1e-10
        assert weights < 1e-10


def test_stages_of_an_asynchronous_pipeline_agree_on_a_dynamic_scale(pool):
    """Each stage updates for itself; both name the tensor in the bad step, and halve the scale at the same time."""
    first, last = pool.run(steps_of, 2, "pp=2,accumulate=2,schedule=2bw", DOWN, {})
    for reported in (first, last):
        assert [skipped for skipped, *_ in reported] == [False, True, False, False]
        assert [after for *_, after, _ in reported] == [START, START, START, START / 2]
        assert reported[1][-1].startswith(f"gradient of {DOWN} not finite on rank 1 (pp 1)")
    assert last[1][1], "the stage with the bad gradient leaves its update out"
    assert not first[1][1], "the other stage makes its own"


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)
        self.steps = 0
    def spoil(self, gradient):
        self.steps += 1
        return gradient * (float("inf") if self.steps in BAD else 1.0)
    def forward(self, x):
        y = self.last(self.first(x))
        y.register_hook(self.spoil)
        return 0.01 * y.float().sum(), torch.tensor(len(x))

def build():
    return Model()

def batch(rows, step):
    return {"x": torch.ones(rows, 3)}
"""


def run(tmp_path, bad, in_backward=False, **precision):
    own = tmp_path / f"own_{len(bad)}.py"  # a file is imported once
    own.write_text(OWN.replace("BAD", repr(bad)))
    config = Config(
        model=f"{own}:build",
        steps=6,
        batch=4,
        dtype="float16",
        run=str(tmp_path / "run"),
        precision=PrecisionConfig(**precision),
        optimizer=OptimizerConfig(in_backward=in_backward),
        clip=0.0 if in_backward else 1.0,
    )
    return start_training.run_training(config)


def test_the_log_and_the_console_name_the_tensor(tmp_path, capsys):
    summary = run(tmp_path, (2, 3))
    steps = list(Run.open(summary.run).records("step"))
    assert [step["skipped"] for step in steps] == [False, True, True, False, False, False]
    assert [step["loss_scale"] for step in steps] == [65536, 65536, 32768, 16384, 16384, 16384]
    found = list(Run.open(summary.run).records("not finite"))
    assert [(line["step"], line["parameter"], line["layer"], line["ranks"]) for line in found] == [
        (2, "last.bias", "last", [0]),
        (3, "last.bias", "last", [0]),
    ]
    assert "NaN" not in json.dumps([*steps, *found])
    shown = capsys.readouterr().out
    assert "note: step 2 skipped: gradient of last.bias not finite on rank 0, loss scale 65536 -> 32768" in shown
    assert "loss scale: dynamic, from 65536" in shown


def test_too_many_in_a_row_stop_the_run_with_the_layer(tmp_path):
    with pytest.raises(ValueError, match=r"3 step\(s\) in a row up to step 4 .* \(first in last\)"):
        run(tmp_path, (2, 3, 4), skips=3)
    with pytest.raises(ValueError, match=r"6 step\(s\) in a row up to step 6"):
        run(tmp_path, tuple(range(9)))


def test_optimizer_in_backward_ends_the_run(tmp_path):
    with pytest.raises(ValueError, match=r"step 2 had gradients that are not finite: gradient of last\.bias"):
        run(tmp_path, (2,), in_backward=True, loss_scale=64.0)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_fixed_scale_that_is_too_high_is_what_to_lower(tmp_path, in_backward):
    with pytest.raises(ValueError, match=r"[Ll]ower precision\.loss_scale or optimizer\.lr"):
        run(tmp_path, (2, 3, 4), in_backward, skips=3, loss_scale=1024.0)
