"""Every optimizer's states and all other training state: bit-equal on the same layout, equal on another."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import largest_error, tiny

from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.models.moe_config import MoEConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from tests.checkpoint.save_and_load_runs import run

SHAPE = tiny()
RULES = {
    "adamw": OptimizerConfig(lr=1e-2),
    "sgd": OptimizerConfig(name="sgd", lr=1e-2, momentum=0.9),
    "plain sgd": OptimizerConfig(name="sgd", lr=1e-2),
    "lion": OptimizerConfig(name="lion", lr=1e-3),
    "lamb": OptimizerConfig(name="lamb", lr=1e-2),
    "adafactor": OptimizerConfig(name="adafactor", lr=1e-2, momentum=0.9),
    "sm3": OptimizerConfig(name="sm3", lr=1e-2, momentum=0.9),
    "muon": OptimizerConfig(name="muon", lr=1e-2),
    "average": OptimizerConfig(lr=1e-2, ema=0.9),
    "in backward": OptimizerConfig(lr=1e-2, in_backward=True),
}


def world(layout: str) -> int:
    return Layout.parse(layout).world


def continued(pool, tmp_path, shape, rule, source, target, **options):
    """(the uninterrupted run, the resumed run) on every rank."""
    folder = str(tmp_path)
    uninterrupted = pool.run(run, world(source), shape, source, rule, folder, (0, 4), save_at=2, **options)[0]
    found = pool.run(run, world(target), shape, target, rule, folder, (2, 4), resume=True, **options)
    for rank in found:
        assert rank["loaded"] == rank["stored"] == uninterrupted["saved"]
        assert rank["read"] <= 1.05 * rank["held"]
    return uninterrupted, found[0]


def assert_same(a, b):
    assert a["losses"][2:] == b["losses"]
    assert a["scales"][2:] == b["scales"]
    assert all(torch.equal(a["values"][name], value) for name, value in b["values"].items())


def assert_equal(a, b):
    assert b["losses"] == pytest.approx(a["losses"][2:], rel=1e-10)
    assert largest_error(b["values"], a["values"]) <= 1e-10


@pytest.mark.parametrize("name", RULES)
def test_every_optimizer(pool, tmp_path, name):
    clip = {"clip": 0.0} if RULES[name].in_backward else {}
    a, b = continued(pool, tmp_path, SHAPE, RULES[name], "dp=2,zero=1", "dp=2,zero=1", **clip)
    assert_same(a, b)
    a, b = continued(pool, tmp_path / "other", SHAPE, RULES[name], "dp=2,zero=2", "tp=2", **clip)
    assert_equal(a, b)


TIED = tiny(tied=True, layers=2)
MIXED = tiny(moe=MoEConfig(experts=4, k=2, ffn=24, gate="loss-free"))


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        (TIED, "pp=2,accumulate=2", "dp=3,zero=3"),
        (TIED, "dp=2,zero=3", "pp=2,zero=1,accumulate=2"),
        (SHAPE, "dp=4,shard=2,zero=3", "dp=2,cp=2,zero=1"),
        (SHAPE, "tp=4,tp_kind=2d", "dp=2,tp=2,zero=2"),
        (SHAPE, "dp=2,offload=optimizer", "dp=1,offload=params"),
        (SHAPE, "dp=2,zero=1,offload=optimizer+disk", "dp=2"),
        (SHAPE, "dp=2", "dp=2,zero=3,offload=params+disk"),
    ],
    ids=str,
)
def test_layouts(pool, tmp_path, shape, source, target):
    a, b = continued(pool, tmp_path, shape, RULES["adamw"], source, target)
    assert_equal(a, b)


@pytest.mark.parametrize(
    ("source", "target"),
    [("dp=4,ep=2,zero=1", "dp=1"), ("dp=2,tp=2,ep=2,etp=2", "dp=4,ep=4,zero=2"), ("dp=2", "pp=2,accumulate=2")],
)
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_experts_and_their_biases(pool, tmp_path, source, target, name):
    a, b = continued(pool, tmp_path, MIXED, RULES[name], source, target)
    assert_equal(a, b)


def test_biases_of_gates_are_written_once_by_the_ranks_of_cp(pool, tmp_path):
    """Written twice, they would add up to the checksum of another state."""
    a, b = continued(pool, tmp_path, MIXED, RULES["adamw"], "cp=2", "dp=1")
    assert_equal(a, b)


@pytest.mark.parametrize(("every", "scales"), [(1, [(64, 128), (128, 256)]), (3, [(16, 32), (32, 32)])])
def test_loss_scale_and_split_masters(pool, tmp_path, every, scales):
    """bfloat16 weights with split float32 master weights, and a dynamic loss scale: bit-equal.

    A power of two changes no bfloat16 gradient, so the scales are compared too: (of a step, of the next). After two
    steps the scale has grown (every=1), or there are two good steps towards it (every=3).
    """
    given = {
        "options": ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.float32),
        "scale": LossScale.dynamic(start=16.0, every=every),
    }
    for layout in ("dp=2", "dp=2,zero=3"):
        a, b = continued(pool, tmp_path / layout, None, RULES["adamw"], layout, layout, **given)
        assert_same(a, b)
        assert b["scales"] == scales


@pytest.mark.parametrize("name", ["adamw", "plain sgd"])
def test_weights_without_master_weights(pool, tmp_path, name):
    """The counter of stochastic rounding continues."""
    given = {"options": ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16)}
    a, b = continued(pool, tmp_path, None, RULES[name], "dp=2,zero=1", "dp=2,zero=1", **given)
    assert_same(a, b)


def test_running_statistics_and_frozen_parameters(pool, tmp_path):
    a, b = continued(pool, tmp_path, None, RULES["adamw"], "dp=2,zero=1", "dp=3,zero=3")
    assert_equal(a, b)


def test_moments_in_8_bits(pool, tmp_path):
    """Bit-equal on the same layout; on another, blocks differ, and so does what 8 bits cannot hold."""
    rule = OptimizerConfig(lr=1e-2, states="int8")
    shape = tiny(vocab=401)
    given = {"options": ParallelOptions(compute_dtype=torch.float32, master_dtype=torch.float32)}
    a, b = continued(pool, tmp_path, shape, rule, "dp=2,zero=1", "dp=2,zero=1", **given)
    assert_same(a, b)
    a, b = continued(pool, tmp_path / "other", shape, rule, "dp=2,zero=1", "dp=3,zero=1", **given)
    assert b["losses"] == pytest.approx(a["losses"][2:], rel=1e-2)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_asynchronous_schedules(pool, tmp_path, schedule):
    """A save drains the microbatches in flight, so a resumed run repeats a run that saves."""
    layout = f"pp=2,schedule={schedule},accumulate=2"
    a, b = continued(pool, tmp_path, SHAPE, OptimizerConfig(lr=1e-2), layout, layout)
    assert_same(a, b)
