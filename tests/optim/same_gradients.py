"""Optimizers fed the same gradients in every layout: no forward, no backward, so that only the update can differ."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from tiny_engines import whole
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.models.model_config import ModelConfig
from echelon.optim import cost
from echelon.optim.flat_segments import build_flat_segments
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.rules.ema import WeightEMA
from echelon.parallel.parallel_model import ParallelModel
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.verification.compare import expected_piece

STEPS, SKIPPED, SCALE = 4, 2, 0.5
"""the third step has no target: nothing may change"""


@cache
def gradient(name: str, shape: tuple[int, ...], step: int, even: bool = False) -> Tensor:
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


def feed(parallel: ParallelModel, optimizer: ShardedOptimizer, rate: float, step: int, *, even: bool = False) -> Tensor:
    """One step of an optimizer on gradients that are a function of the step; gives whether it counts."""
    for unit, piece in parallel.sharded_model.pieces():
        if piece.param.trainable:
            logical = gradient(piece.param.name, piece.param.shape, step, even)
            parallel.sharded_model.piece_view(unit.grad, piece).copy_(expected_piece(logical, piece))
    device = parallel.options.device
    live = torch.tensor(step != SKIPPED, device=device)
    optimizer.step(rate / (1 + step), torch.tensor(SCALE, dtype=torch.float64, device=device), live)
    return live


def fed(
    shape: ModelConfig,
    layout: str,
    rules: list[OptimizerConfig],
    even: bool = False,
    leave_out: str = "",
    compute: torch.dtype = torch.float64,
) -> list[Fed]:
    """On a rank: what each rule makes of the same gradients, from the same weights."""
    master = torch.promote_types(compute, torch.float32)
    options = ParallelOptions(compute_dtype=compute, master_dtype=master, drop_collective=leave_out)
    parallel = Engine(models.build(shape, "meta", dtype=master), layout, options=options).parallel
    first = [unit.master.values().clone() for unit in parallel.sharded_model.param_groups]
    found = []
    for rule in rules:
        for unit, values in zip(parallel.sharded_model.param_groups, first, strict=True):
            unit.master.set_values(0, values)
        optimizer = build_optimizer(parallel, rule)
        average = WeightEMA(build_flat_segments(parallel, rule), rule.ema) if rule.ema else None
        for step in range(STEPS):
            live = feed(parallel, optimizer, rule.lr, step, even=even)
            if average is not None:
                average.step(live)
        states = [*optimizer.states(), *(average.states() if average else ())]
        size = sum(state.numel() * state.element_size() for state in states if state.dim())
        if average is not None:
            average.swap()
        flat = parallel.sharded_model
        found.append(
            Fed(
                values=whole(parallel, "master"),
                bytes=size,
                claimed=cost.rank_state_bytes(rule, parallel.placement, master_bytes=master.itemsize),
                tied=[flat.piece_view(u.master.values(), p).clone() for u, p in flat.pieces() if p.param.tied_pp_ranks],
            )
        )
    return found
