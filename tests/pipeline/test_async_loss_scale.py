"""A dynamic loss scale where stages update at different times: consistent, and halved once by an overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engines import SGD, batch_of, float64, largest_error, tiny, whole
from torch import Tensor

from echelon import models
from echelon.config.run_config import Config
from echelon.launch.rank_pool import RankPool
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import DelayedLossScaler, LossScale, LossScaler
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_settings

SCHEDULES = {
    "pp=2,schedule=pipedream,accumulate=3": 3,
    "pp=3,schedule=pipedream-vsync,accumulate=2": 2,
    "pp=2,schedule=2bw,accumulate=4": 4,
}
"""layouts, with the rows of a batch"""


def scaler_of(start: float, every: int) -> DelayedLossScaler:
    return DelayedLossScaler(LossScaler(LossScale.dynamic(start=start, every=every), torch.device("cpu")))


def test_an_overflow_halves_the_scale_once_for_all_updates_in_flight() -> None:
    scaler = scaler_of(64.0, 2)
    for update in range(4):
        scaler.begin(update)
    scaler.report(0, finite=False, had_targets=True)
    assert scaler.scale == 32.0
    scaler.begin(4)
    for update in (1, 2, 3):  # they began with 64
        scaler.report(update, finite=False, had_targets=True)
    assert scaler.scale == 32.0
    scaler.report(4, finite=False, had_targets=True)
    assert scaler.scale == 16.0


def test_good_updates_double_the_scale_that_they_used() -> None:
    scaler = scaler_of(8.0, 2)
    for update in range(3):
        scaler.begin(update)
    scaler.report(0, finite=True, had_targets=True)
    scaler.report(1, finite=True, had_targets=False)
    assert (scaler.scale, scaler.good_updates) == (8.0, 1)
    scaler.report(2, finite=True, had_targets=True)
    assert (scaler.scale, scaler.good_updates) == (16.0, 0)
    scaler.begin(3)
    scaler.write()
    scaler.begin_stream()
    assert (scaler.scale, scaler.good_updates) == (16.0, 0)


def test_good_updates_that_used_an_older_scale_do_not_count() -> None:
    scaler = scaler_of(64.0, 2)
    for update in range(3):
        scaler.begin(update)
    scaler.report(0, finite=False, had_targets=True)
    for update in (1, 2):  # they began with 64
        scaler.report(update, finite=True, had_targets=True)
    assert (scaler.scale, scaler.good_updates) == (32.0, 0)


def trained(
    layout: str, rows: int, recipe: LossScale, overflow: tuple[int, int] = (-1, -1)
) -> tuple[dict[str, Tensor], list[float], float, float]:
    """On a rank: weights and scales of four steps; on `overflow`'s rank, that update's gradient norm is infinite."""
    shape = tiny(layers=3)
    model = models.build(shape, "meta", dtype=torch.float64)
    engine = Engine(model, layout, SGD, clip=0.0, options=float64(), loss_scale=recipe)
    engine.model.train()
    measure, calls = engine.grad_norm.norm_and_slice_norms, [0]

    def measured(*args: Any) -> tuple[Tensor, Tensor]:
        norm, slices = measure(*args)
        calls[0] += 1
        here = torch.distributed.get_rank() == overflow[0] and calls[0] - 1 == overflow[1]
        return (norm * float("inf") if here else norm), slices

    engine.grad_norm.norm_and_slice_norms = measured  # type: ignore[method-assign]
    scales = [engine.step(batch_of(shape, rows, seed=step)).loss_scale for step in range(4)]
    engine.drain()
    scaler = engine.normalizer.loss_scaler
    return whole(engine.parallel, "master"), scales, float(scaler.scale), engine.pipeline.async_runtime.grad_seed  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", SCHEDULES)
def test_a_scale_that_changes_changes_no_update(pool: RankPool, layout: str) -> None:
    """Updates divide by the scale with which their backward began, on every stage."""
    ranks, rows = int(layout[3]), SCHEDULES[layout]
    truth = pool.run(trained, ranks, layout, rows, LossScale())[0]
    found = pool.run(trained, ranks, layout, rows, LossScale.dynamic(start=4.0, every=1))
    assert largest_error(found[0][0], truth[0]) <= 1e-10
    assert found[0][2] > 4.0
    assert len({(tuple(scales), scale, seed) for _, scales, scale, seed in found}) == 1, "all ranks know the scale"


@pytest.mark.parametrize("layout", SCHEDULES)
@pytest.mark.parametrize("stage", [0, -1])
def test_an_overflow_of_one_stage_leaves_out_its_update_alone(pool: RankPool, layout: str, stage: int) -> None:
    """As without a scale, where that update is left out too; the scale halves once, and every stage knows."""
    ranks, rows = int(layout[3]), SCHEDULES[layout]
    overflow = (range(ranks)[stage], 1)
    truth, clean = (pool.run(trained, ranks, layout, rows, LossScale(), bad)[0][0] for bad in (overflow, (-1, -1)))
    found = pool.run(trained, ranks, layout, rows, LossScale.dynamic(start=64.0, every=1000), overflow)
    assert largest_error(found[0][0], truth) <= 1e-10
    assert largest_error(truth, clean) > 1e-6, "an update was left out"
    assert [scale for _, _, scale, _ in found] == [32.0] * ranks
    assert found[0][1][0] == 64.0


def resumed(layout: str) -> float:
    """On a rank: the loss scale in the seed of backward, after a step that is not the first of its run."""
    engine = Engine(
        models.build(tiny(layers=3), "meta", dtype=torch.float64),
        layout,
        SGD,
        options=float64(),
        loss_scale=LossScale(start=1024.0),
    )
    engine.num_steps = 7
    count = engine.step(batch_of(tiny(layers=3), 4)).count
    engine.drain()
    return engine.pipeline.async_runtime.grad_seed * count  # type: ignore[union-attr]


def test_a_fixed_scale_holds_after_a_resume(pool: RankPool) -> None:
    """It was set with the first step of a run alone: a resumed run went on without it."""
    assert pool.run(resumed, 2, "pp=2,schedule=2bw,accumulate=4") == pytest.approx([1024.0, 1024.0])


def half(layout: str, rows: int) -> tuple[list[float], list[bool], list[float]]:
    """On a rank: losses, skipped steps and scales of float16 from a scale that overflows, by the default settings."""
    config = Config.load(
        None, ["dtype=float16", f"layout={layout}", f"batch={rows}", "precision.scale_start=4194304.0"]
    )
    shape = tiny(layers=3)
    options = ParallelOptions(compute_dtype=torch.float16)
    recipe = loss_scale_settings(config)
    engine = Engine(models.build(shape, "meta"), layout, SGD, options=options, loss_scale=recipe)
    engine.model.train()
    results = [engine.step(batch_of(shape, rows, seed=0)) for _ in range(14)]
    engine.drain()
    return [r.loss for r in results], [r.skipped for r in results], [r.loss_scale for r in results]


def test_float16_trains_with_its_default_scale(pool: RankPool) -> None:
    """It was refused. The first updates overflow, the scale falls, and then the loss does."""
    losses, skipped, scales = pool.run(half, 2, "pp=2,schedule=2bw,accumulate=4", 4)[0]
    assert skipped[0]
    assert not any(skipped[-4:])
    assert scales[0] > scales[-1] >= 1.0
    assert losses[-1] < losses[0]
