"""The runtime with a model of a user's own, and when something goes wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import nn

import echelon as ec
from echelon.launch.failure import RankError
from echelon.models.chain import chain_of
from tests.pipeline import chains

SPEC = f"{Path(chains.__file__)}:build"


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
def test_several_tensors_travel_and_a_weight_is_on_two_stages(pool, layout):
    report = ec.verify(SPEC, layout, pool=pool, steps=3)
    assert report.passed, report


def test_a_stage_that_raises_ends_the_job_with_its_traceback(pool):
    started = time.perf_counter()
    with pytest.raises(RankError, match="the third layer cannot go on") as caught:
        pool.run(chains.raises, 2, timeout=60.0)
    assert time.perf_counter() - started < 15
    assert "chains.py" in str(caught.value)
    assert caught.value.rank == 1


def test_a_model_without_a_chain_is_refused():
    with pytest.raises(ValueError, match=r"where Linear can be cut; give the class a method `chain\(\)`.*or use pp=1"):
        chain_of(nn.Linear(2, 2))


def test_a_chain_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"no such module: nothing \(embed\); no link uses scale"):
        chain_of(chains.Unfit())


def test_asynchronous_stages_cannot_share_a_weight(pool):
    report = ec.verify(SPEC, "pp=2,schedule=pipedream", pool=pool, steps=1)
    assert "untie it (tied=false), or use schedule=1f1b" in report.verdicts[0].trouble
