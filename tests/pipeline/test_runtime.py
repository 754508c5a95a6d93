"""The runtime with a model of a user's own, and when something goes wrong."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from cpu_clock import ALWAYS
from tiny_engines import batch_of, engine_of, tiny
from torch import nn

import echelon as ec
from echelon.launch.rank_failure import RankError
from echelon.layout import Layout
from echelon.models.pipeline_model import get_pipeline_model
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.simulate import simulate
from tests.pipeline import odd_pipeline_models, pipeline_models

SPEC = f"{Path(pipeline_models.__file__)}:build"
ODD = Path(odd_pipeline_models.__file__)


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,accumulate=3",
        "pp=3,accumulate=2,schedule=zb-h1",
        "pp=2,accumulate=2,schedule=interleaved",
        "pp=2,accumulate=3,schedule=dualpipe-v",
        "dp=2,pp=2,accumulate=2,zero=3",
        "pp=5,accumulate=1,schedule=gpipe,recompute=full",
    ],
)
def test_several_tensors_are_sent_and_a_weight_is_on_two_stages(pool, layout):
    report = ec.verify(SPEC, layout, pool=pool, steps=3)
    assert report.passed, report


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("TupleOfOne", "pp=2,accumulate=2"),
        ("TupleOfOne", "pp=2,accumulate=2,schedule=zb-v"),
        ("ListOfTwo", "pp=2,accumulate=2"),
        ("Checkpointed", "pp=2,accumulate=3,schedule=zb-h1"),
        ("Checkpointed", "dp=2,pp=2,accumulate=2,schedule=zb-v,zero=3,recompute=full"),
        ("CheckpointedWhole", "pp=2,accumulate=2,schedule=zb-h1"),
        ("InPlace", "pp=2,accumulate=2"),
        ("InPlace", "pp=2,accumulate=2,schedule=zb-v"),
        ("Bare", "pp=4,accumulate=2"),
        ("Bare", "pp=4,accumulate=2,schedule=2bw"),
        ("Computed", "dp=2,pp=2,accumulate=3,zero=3,schedule=zb-h1"),
        ("Computed", "pp=2,accumulate=2,schedule=zb-h1,recompute=full"),
        ("HalfFrozen", "pp=2,accumulate=2,schedule=2bw"),
        ("HalfFrozen", "pp=3,accumulate=2,schedule=pipedream"),
        ("OneRow", "pp=2,accumulate=2,schedule=zb-h1"),
    ],
)
def test_odd_models_equal_one_device(pool, model, layout):
    report = ec.verify(f"{ODD}:{model}", layout, pool=pool, batch=f"{ODD}:batch", steps=2)
    assert report.passed, report


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("Outside", "dp=2,pp=2,zero=3", "set shard.units to patterns of the modules that are called, or use zero=2"),
        ("Mapped", "pp=2", "returned dict (blocks.1), which cannot be sent; return a tensor or a tuple of tensors"),
        ("Nothing", "pp=2", "returned a tuple with NoneType in it (blocks.1)"),
        ("Short", "pp=2", "whose dtype cannot be sent (torch.int16); use one of float32, "),
    ],
)
def test_unsupported_models_are_rejected(pool, model, layout, said):
    with pytest.raises(RankError, match=re.escape(said)):
        pool.run(odd_pipeline_models.step, Layout.parse(layout).world, model, layout)


def test_a_stage_that_raises_ends_the_job_with_its_traceback(pool):
    started = time.perf_counter()
    with pytest.raises(RankError, match="the third layer cannot go on") as caught:
        pool.run(pipeline_models.raises, 2, timeout=2 * ALWAYS)
    assert time.perf_counter() - started < ALWAYS
    assert "pipeline_models.py" in str(caught.value)
    assert caught.value.rank == 1


def test_the_old_name_of_pipeline_model_is_refused_with_the_new_one() -> None:
    class OldModel(nn.Linear):
        def chain(self) -> None: ...

    with pytest.raises(ValueError, match=r"OldModel has a method `chain\(\)`, which is now `pipeline_model\(\)`"):
        get_pipeline_model(OldModel(2, 2))


def test_a_model_without_pipeline_layers_is_refused():
    with pytest.raises(ValueError, match=r"inputs of the forward of Linear.*`pipeline_model\(\)`.*or use pp=1"):
        get_pipeline_model(nn.Linear(2, 2))


def test_pipeline_layers_that_do_not_match_the_model_are_refused():
    with pytest.raises(ValueError, match=r"unknown modules: nothing \(embed\); no layer uses scale"):
        get_pipeline_model(pipeline_models.Unfit())
    with pytest.raises(ValueError, match="several layers are named same"):
        get_pipeline_model(pipeline_models.Named())


def executed_actions(layout):
    engine = engine_of(tiny(layers=4), layout)
    engine.pipeline.runtime.spans = []
    engine.step(batch_of(tiny(layers=4), engine.layout.batch))
    return engine.pipeline.runtime.spans


@pytest.mark.parametrize("schedule", ["dualpipe-v", "zb-v"])
def test_the_executed_order_is_the_simulated_one(pool, schedule):
    """Action by action, one after the other, also where a paper overlaps two."""
    planned = simulate(lower(make_schedule(schedule, 2, 5)))
    for rank, spans in enumerate(pool.run(executed_actions, 2, f"pp=2,accumulate=5,schedule={schedule}")):
        assert [text for text, _, _ in spans] == [str(span.action) for span in planned.spans(rank)]
        assert all(first[2] <= second[1] for first, second in pairwise(spans))


def test_asynchronous_stages_cannot_share_a_weight(pool):
    report = ec.verify(SPEC, "pp=2,schedule=pipedream", pool=pool, steps=1)
    assert "untie it (tied=false), or use schedule=1f1b" in report.verdicts[0].trouble
