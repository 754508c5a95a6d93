"""A global batch of 8 divided in every way under ZeRO 1, 2, 3: equal gradients, fp32 sums, the policy printed."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import SGD, batch_of, engine_of, float64, largest_error, one_device, tiny, whole
from torch import nn

from echelon import models
from echelon.config.run_config import Config
from echelon.layout import Layout
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from echelon.training.engine import Engine
from echelon.training.logging.metrics import PeakFlops
from echelon.training.logging.resolved_settings import resolved_settings

SHAPE = tiny("llama")
# dp x accumulate, and with dp=2 also fewer and larger microbatches.
WAYS = ("dp=1,accumulate=8", "dp=2,accumulate=4", "dp=8", "dp=2,microbatch=2,accumulate=2", "dp=2,microbatch=4")


def batch():
    """Rows with different numbers of targets: a mean of means would not do."""
    made = batch_of(SHAPE, 8)
    for row in range(8):
        made["targets"][row, : row % 5] = -100
    return made


def gradients(layout):
    engine = engine_of(SHAPE, layout)
    result = engine.step(batch())
    return result.loss, result.norm, whole(engine.parallel)


@pytest.fixture(scope="module")
def truth():
    model = one_device(SHAPE)
    total, count = model(**batch())
    total.backward()
    return (total.detach() / count).item(), {name: p.grad / count for name, p in model.named_parameters()}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_equal(pool, truth, zero):
    loss, expected = truth
    for way in WAYS:
        layout = Layout.parse(f"{way},zero={zero}")
        assert layout.batch == 8
        shown, _, found = pool.run(gradients, layout.world, str(layout))[0]
        assert shown == pytest.approx(loss, abs=1e-10), way
        assert largest_error(found, expected) < 1e-10, way


class Slope(nn.Module):
    """The gradient of its sum of losses is the sum of x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))

    def forward(self, x):
        return (self.weight.sum() * x).sum(), torch.tensor(1)


def summed(layout, compute, reduce=None):
    """A power of two, then ones: bfloat16 has 8 bits, and 256 + 1 is 256 in it, and so on for float16's 11."""
    engine = Engine(Slope(), layout, options=ParallelOptions(compute_dtype=compute, reduce_dtype=reduce))
    x = torch.ones(8)
    x[0] = 256 if compute == torch.bfloat16 else 2048
    engine.step({"x": x})
    gradient = whole(engine.parallel)["weight"]
    unit = engine.parallel.sharded_model.param_groups[0]
    return gradient.unique().tolist(), str(unit.grad.dtype), str(unit.master.dtype), str(unit.unsharded_param.dtype)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["dp=1,accumulate=8", "dp=2,zero=1,accumulate=4", "dp=2,zero=3,accumulate=4"])
def test_accumulation_and_reduction_are_in_fp32(pool, layout, compute):
    for values, *types in pool.run(summed, Layout.parse(layout).world, layout, compute):
        # torch's own update has divided it by the number of targets.
        assert values == [263.0 if compute == torch.bfloat16 else 2055.0 / 8]
        assert types == ["torch.float32", "torch.float32", str(compute)]


@pytest.mark.parametrize("layout", ["dp=1,accumulate=8", "dp=2,zero=2,accumulate=4"])
def test_another_reduce_dtype_must_be_configured(pool, layout):
    for values, gradients, *_ in pool.run(summed, Layout.parse(layout).world, layout, torch.bfloat16, torch.bfloat16):
        assert values[0] < 263.0
        assert gradients == "torch.bfloat16"


def scaled(layout, recipe):
    engine = Engine(models.build(SHAPE, "meta"), layout, SGD, options=float64(), loss_scale=recipe)
    results = [engine.step(batch()) for _ in range(3)]
    reported = [(result.loss, result.norm, result.next_loss_scale) for result in results]
    return reported, whole(engine.parallel, "master")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_loss_scale_changes_nothing_in_any_split(pool, zero):
    plain, expected = pool.run(scaled, 1, "dp=1", None)[0]
    for way in WAYS[:3]:
        layout = Layout.parse(f"{way},zero={zero}")
        reported, found = pool.run(scaled, layout.world, str(layout), LossScale.dynamic(start=1024.0, every=2))[0]
        assert [each[:2] for each in reported] == [pytest.approx(each[:2], abs=1e-10) for each in plain]
        assert [scale for *_, scale in reported] == [1024.0, 2048.0, 2048.0]
        assert largest_error(found, expected) < 1e-10, way


def printed(layout):
    engine = engine_of(SHAPE, layout)
    rows = resolved_settings(Config(batch=engine.layout.batch), engine, PeakFlops(flops=1.0, source=""), 1)
    return {name: f"{value} ({why})" for name, value, why in rows}


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("dp=2,accumulate=2", "all-reduce over 2 ranks, once a step"),
        ("dp=2,zero=1", "reduce-scatter over 2 ranks, once a step"),
        ("dp=2,zero=2", "reduce-scatter over 2 ranks, every microbatch"),
        (
            "dp=4,zero=3,shard=2",
            "reduce-scatter over 2 ranks, every microbatch, all-reduce over 2 replicas once a step",
        ),
    ],
)
def test_the_reduction_policy_is_printed(pool, layout, policy):
    rows = pool.run(printed, Layout.parse(layout).world, layout)[0]
    reason = "then divided once by the number of valid targets of the step"
    assert rows["reduction"] == f"{policy}, in float64 ({reason})"
    assert "gradients float64" in rows["dtypes"]
