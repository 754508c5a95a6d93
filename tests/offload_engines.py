"""Small engines with offloaded states or activations."""

from __future__ import annotations

from typing import Any

import torch
from tiny_engines import batch_of, float64, tiny

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.memory.offload.host_transfer import HostLink
from echelon.training.engine import Engine

ADAMW = OptimizerConfig(lr=1e-2)
SHAPE = tiny(layers=4)


def engine_away(layout: str, rule: OptimizerConfig = ADAMW, **options: Any) -> Engine:
    model = models.build(SHAPE, "meta", dtype=torch.float64)
    engine = Engine(model, layout, rule, clip=0.5, options=float64(**options))
    engine.model.train()
    return engine


def link_of(engine: Engine) -> HostLink:
    away = engine.parallel.offload
    link = (
        away.host.link
        if away.host is not None
        else away.activation_offload.link
        if away.activation_offload is not None
        else None
    )
    assert link is not None
    return link


def stepped(engine: Engine, steps: int = 3, rows: int = 4) -> Engine:
    for step in range(steps):
        engine.step(batch_of(SHAPE, rows, seed=step))
    return engine
