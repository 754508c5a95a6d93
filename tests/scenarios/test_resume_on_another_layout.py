"""A state that one layout saved, on another: equal to an uninterrupted run, moments included.

A renamed key is refused by name: tests/checkpoint/test_storage.py.
"""

from __future__ import annotations

import pytest
from tiny_engines import largest_error, tiny

from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from tests.checkpoint.save_and_load_runs import run

ADAMW = OptimizerConfig(lr=1e-2)
SHAPE = tiny(layers=4)


def world(layout: str) -> int:
    return Layout.parse(layout).world


@pytest.mark.parametrize("target", ["dp=1", "tp=4", "pp=2,accumulate=2", "dp=3,zero=3"])
def test_a_checkpoint_of_dp2_tp2_resumes_on_any_layout(pool, tmp_path, target):
    """Six steps on dp2 x tp2, saved at 3; steps 4 to 6 on another layout."""
    source = "dp=2,tp=2"
    whole = pool.run(run, 4, SHAPE, source, ADAMW, str(tmp_path), (0, 6), save_at=3)[0]
    found = pool.run(run, world(target), SHAPE, target, ADAMW, str(tmp_path), (3, 6), resume=True)
    for rank in found:
        assert rank["loaded"] == rank["stored"] == whole["saved"]
        assert rank["read"] <= 1.05 * rank["held"]
        assert rank["losses"] == pytest.approx(whole["losses"][3:], rel=1e-12)
        assert largest_error(rank["values"], whole["values"]) <= 1e-10
