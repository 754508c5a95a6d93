"""What the planner counts of a grid of tensor parallelism is what a run counts."""

from __future__ import annotations

import pytest
import torch

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.collective import wire_bytes
from echelon.models import model_config
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.tp.cost import TransformerSizes, grid_shape
from echelon.planning.cluster import cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.memory_model import state_bytes_by_category
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.scenario import Scenario, supports_precision
from echelon.training.engine import Engine

MODEL, SEQ_LEN = "llama-tiny", 64
GRIDS = ("tp=4,tp_kind=2d,microbatch=4", "tp=8,tp_kind=2.5d,depth=2,microbatch=4", "tp=8,tp_kind=3d,microbatch=4")


def counted(text: str) -> tuple[dict[str, int], float]:
    """On a rank of a real run: bytes of states, and bytes on the wire over the axes of tp in a step."""
    layout, model = Layout.parse(text), model_config.find_model(MODEL)
    options = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.float32)
    engine = Engine(models.build(model, "meta"), layout, options=options)
    traffic = TransformerSizes(
        layers=model.layers,
        width=model.width,
        batch=layout.microbatch,
        seq_len=SEQ_LEN,
        dropout=False,
        element_bytes=2,
        loss_bytes=4,
    )
    ranks = {axis: getattr(grid_shape(layout), axis) for axis in "zyx"}
    issued = [item for item in engine.collectives(traffic) if item.axis in ranks]
    wire = sum(wire_bytes(item.op, item.bytes, ranks[item.axis]) * item.count for item in issued)
    held = dp_cost.state_bytes(
        engine.parallel.placement.param_groups, engine.parallel.policy, compute_bytes=2, master_bytes=4, moments=2
    )
    return held, wire


@pytest.mark.parametrize("layout", [*GRIDS, f"{GRIDS[0]},recompute=full,accumulate=2"])
def test_states_and_collectives_of_a_plan_equal_those_of_a_run(pool: RankPool, layout: str) -> None:
    held, wire = pool.run(counted, Layout.parse(layout).world, layout)[0]
    case = Scenario(
        shape=resolve_shape(MODEL),
        cluster=cluster.parse_cluster("8xh100"),
        layout=Layout.parse(layout),
        seq_len=SEQ_LEN,
    )
    planned = state_bytes_by_category(case, 0)
    for name, size in held.items():
        assert planned.get(name, 0) == pytest.approx(size, rel=0.02), name
    assert count_work(case).microbatch.tp.wire_bytes * case.layout.accumulate == pytest.approx(wire, rel=0.02)


def test_fp8_is_not_for_a_tp_grid() -> None:
    assert supports_precision("fp8", Layout.parse("tp=2"))
    assert not supports_precision("fp8", Layout.parse(GRIDS[0]))
    assert supports_precision("bf16", Layout.parse(GRIDS[0]))
