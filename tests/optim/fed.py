"""Optimizers fed the same gradients in every layout: no forward, no backward, so that only the update can differ."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from laid_out import float64, whole
from torch import Tensor

from echelon import models
from echelon.models.sizes import ModelConfig
from echelon.optim import cost
from echelon.proof.compare import expected
from echelon.train.engine import Engine
from echelon.train.sections import OptimizerConfig

STEPS, SKIPPED, SCALE = 4, 2, 0.5
"""the third step has no target: nothing may change"""


def gradient(name: str, shape: tuple[int, ...], step: int, *, even: bool = False) -> Tensor:
    """Of very different sizes, with a row of zeros; `even`: of one size, with any sign."""
    source = np.random.default_rng(zlib.crc32(f"{name} {step}".encode()))
    found = source.standard_normal(shape)
    if even:
        return torch.from_numpy(np.sign(found))
    found = np.asarray(found * np.exp(source.standard_normal(shape)) * 0.1)
    if found.ndim > 1:
        found[..., found.shape[-2] // 2, :] = 0.0
    return torch.from_numpy(found)


@dataclass
class Fed:
    values: dict[str, Tensor]
    """the master values of all parameters"""
    bytes: int
    claimed: int
    """of states"""
    tied: list[Tensor]
    """this rank's shards of weights that several stages hold"""


def feed(engine: Engine, step: int, *, even: bool = False, lr: float | None = None) -> None:
    flat = engine.parallel.flat
    for unit, piece in flat.pieces():
        if piece.entry.trainable:
            logical = gradient(piece.entry.name, piece.entry.shape, step, even=even)
            flat.view(unit.grad, piece).copy_(expected(logical, piece))
    live = torch.tensor(step != SKIPPED)
    rate = engine.rule.lr / (1 + step) if lr is None else lr
    engine.optimizer.step(rate, torch.tensor(SCALE, dtype=torch.float64), live)
    if engine.average is not None:
        engine.average.step(live)
    flat.updated()


def fed(shape: ModelConfig, layout: str, rules: list[OptimizerConfig], even: bool = False) -> list[Fed]:
    """On a rank: what each rule makes of the same gradients."""
    found = []
    for rule in rules:
        model = models.build(shape, "meta", dtype=torch.float64)
        engine = Engine(model, layout, rule, options=float64())
        for step in range(STEPS):
            feed(engine, step, even=even)
        states = [*engine.optimizer.states(), *(engine.average.states() if engine.average else ())]
        flat = engine.parallel.flat
        found.append(
            Fed(
                values=whole(engine.parallel, "master"),
                bytes=sum(state.numel() * state.element_size() for state in states if state.dim()),
                claimed=cost.held_bytes(rule, engine.parallel.placement, master_bytes=8),
                tied=[flat.view(u.master.values(), p).clone() for u, p in flat.pieces() if p.entry.holders],
            )
        )
    return found
