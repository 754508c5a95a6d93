"""float16 with a dynamic loss scale learns what float32 learns."""

from __future__ import annotations

import statistics

import torch
from laid_out import tiny

from echelon import models
from echelon.parallel.apply import Options
from echelon.precision.loss_scale import LossScale
from echelon.train.engine import Engine
from echelon.train.sections import OptimizerConfig

STEPS, SEEDS = 40, 3
SHAPE = tiny("llama", vocab=31)


def batch(seed: int, step: int) -> dict[str, torch.Tensor]:
    """Each token is three times the one before it plus one of two numbers, by chance."""
    source = torch.Generator().manual_seed(1000 * seed + step)
    rows = [torch.randint(0, SHAPE.vocab, (4, 1), generator=source)]
    for _ in range(16):
        rows.append((3 * rows[-1] + torch.randint(0, 2, (4, 1), generator=source)) % SHAPE.vocab)
    ids = torch.cat(rows, dim=1)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def losses(compute, every):
    """On a rank: the mean of the last losses of every seed, and how often the scale was halved."""
    found, skipped = [], 0
    for seed in range(SEEDS):
        scale = LossScale.dynamic(start=2.0**18, every=every) if compute == torch.float16 else None
        options = Options(compute=compute, seed=seed)
        rule = OptimizerConfig(lr=1e-2)
        engine = Engine(models.build(SHAPE, "meta"), "dp=1", rule, clip=1.0, options=options, loss_scale=scale)
        results = [engine.step(batch(seed, step)) for step in range(STEPS)]
        found.append(statistics.mean(result.loss for result in results[-5:]))
        skipped += sum(result.skipped for result in results)
    return found, skipped


def test_half_learns_what_float32_learns(pool):
    ((truth, none),) = pool.run(losses, 1, torch.float32, 0)
    ((half, skipped),) = pool.run(losses, 1, torch.float16, 10)
    assert none == 0
    assert 0 < skipped < STEPS // 2, "the first scale is too high on purpose"
    noise = statistics.stdev(truth)
    assert max(truth) < 3.3 - 3 * noise, "something is learned: log 31 is 3.4"
    # Steps that were left out are steps behind.
    assert abs(statistics.mean(half) - statistics.mean(truth)) < noise + 0.05
