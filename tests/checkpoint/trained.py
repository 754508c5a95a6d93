"""Small runs for the ranks of the pool: some steps, a save, a load on another layout, some steps more."""

from __future__ import annotations

import torch
from laid_out import batch_of, whole
from torch import nn

from echelon import models
from echelon.checkpoint.storage import storage_of
from echelon.models.sizes import ModelConfig
from echelon.parallel.apply import Options
from echelon.precision.loss_scale import LossScale
from echelon.train.engine import Engine
from echelon.train.saved import Saving
from echelon.train.sections import OptimizerConfig

ROWS = 12


def built(
    shape: ModelConfig,
    layout: str,
    rule: OptimizerConfig,
    *,
    options: Options | None = None,
    scale: LossScale | None = None,
    model: nn.Module | None = None,
    clip: float = 1.0,
) -> Engine:
    options = options or Options(compute=torch.float64, master=torch.float64)
    model = model or models.build(shape, "meta", dtype=options.compute)
    engine = Engine(model, layout, rule, clip=clip, options=options, loss_scale=scale)
    engine.model.train()
    return engine


def stepped(engine: Engine, shape: ModelConfig, first: int, last: int) -> list[float]:
    """Losses of steps first + 1 to last."""
    found = []
    for step in range(first, last):
        found.append(engine.step(batch_of(shape, ROWS, seed=step), lr=0.01 * (step + 1)).loss)
    engine.drain()
    return found


def run(
    shape: ModelConfig,
    layout: str,
    rule: OptimizerConfig,
    folder: str,
    steps: tuple[int, int],
    *,
    resume: bool = False,
    save_at: int | None = None,
    options: Options | None = None,
    scale: LossScale | None = None,
    clip: float = 1.0,
) -> dict[str, object]:
    """Trains from one step to another; the state at the end, put together from all ranks."""
    engine = built(shape, layout, rule, options=options, scale=scale, clip=clip)
    saving = Saving(engine, storage_of(folder))
    told: dict[str, object] = {}
    if resume:
        loaded = saving.load(steps[0])
        told |= {"loaded": loaded.hash, "stored": loaded.index.hash, "read": loaded.nbytes, "held": loaded.held}
    losses = []
    for step in range(*steps):
        losses += stepped(engine, shape, step, step + 1)
        if step + 1 == save_at:
            saving.save({})
    saving.wait()
    told |= {"losses": losses, "saved": saving.hash, "values": whole(engine.parallel, "master")}
    saving.close()
    engine.close()
    return told
