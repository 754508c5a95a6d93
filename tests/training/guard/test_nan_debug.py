"""A loss that is not finite names the first layer whose output is not, on every layout."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from echelon.config.run_config import Config
from echelon.launch.rank_failure import RankError
from echelon.layout import Layout
from echelon.training.engine import Engine
from echelon.training.loop import train_on_rank
from echelon.training.run.run_dir import Run


def poisoned(config: Config, name: str, rank: int) -> None:
    """The second step finds a weight of one rank that is not a number."""
    run = Engine.step_microbatches

    def run_poisoned(self, *args, **kwargs):
        if self.num_steps == 1 and (dist.get_rank() if dist.is_initialized() else 0) == rank:
            for unit in self.parallel.sharded_model.param_groups:
                if name in unit.parameters:
                    with torch.no_grad():
                        unit.master.values().fill_(float("nan"))
                    unit.after_update()
        return run(self, *args, **kwargs)

    Engine.step_microbatches = run_poisoned
    try:
        train_on_rank(config, True)
    finally:
        Engine.step_microbatches = run


@pytest.mark.parametrize(
    ("layout", "rank", "ranks"),
    [("dp=1", 0, [0]), ("dp=2,zero=3", 1, [0, 1]), ("tp=2", 1, [1]), ("pp=2,accumulate=2", 1, [1])],
)
def test_the_first_nonfinite_output_is_located(pool, tmp_path, layout, rank, ranks):
    """Backward comes to the head first, and finds the gradient of its weight not finite: it began elsewhere."""
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n * n}; " for n in range(2000)))
    settings = {
        "data.path": json.dumps([str(tmp_path / "text.txt")]),
        "seq_len": 16,
        "batch": 4,
        "steps": 4,
        "layout": layout,
        "device": "cpu",
        "run": tmp_path / "run",
        "eval.every": 0,
        "sample.tokens": 0,
        "precision.skips": 1,
    }
    config = Config.load(None, [f"{key}={value}" for key, value in settings.items()])
    world = Layout.parse(layout).world
    with pytest.raises(RankError, match=r"diverged: 1 step.* \(first in blocks\.2"):
        pool.run(poisoned, world, config, "blocks.2.mlp.down.weight", rank)
    (record,) = Run.open(tmp_path / "run").records("not finite")
    assert (record["step"], record["loss"]) == (2, True)
    assert not record["parameter"].startswith("blocks.2.")
    assert record["output"]["module"].startswith("blocks.2.")
    assert record["output"]["ranks"] == ranks
    assert record["layer"] == record["output"]["module"]
