"""float16 with a dynamic loss scale learns what float32 learns."""

from __future__ import annotations

import statistics

import torch
from tiny_engines import tiny

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.kernels.layers.cross_entropy import chunked_cross_entropy
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from echelon.training.engine import Engine

STEPS, SEEDS = 30, 3
SHAPE = tiny("llama", vocab=31)


def batch(seed: int, step: int) -> dict[str, torch.Tensor]:
    """Each token is three times the previous one plus a random one of two numbers."""
    source = torch.Generator().manual_seed(1000 * seed + step)
    rows = [torch.randint(0, SHAPE.vocab, (4, 1), generator=source)]
    for _ in range(16):
        rows.append((3 * rows[-1] + torch.randint(0, 2, (4, 1), generator=source)) % SHAPE.vocab)
    ids = torch.cat(rows, dim=1)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def losses(compute, every):
    """On a rank: the mean of the last losses of every seed, and how many steps were left out; those are repeated."""
    found, skipped = [], 0
    for seed in range(SEEDS):
        scale = LossScale.dynamic(start=2.0**18, every=every) if compute == torch.float16 else None
        options = ParallelOptions(compute_dtype=compute, seed=seed)
        rule = OptimizerConfig(lr=1e-2)
        engine = Engine(models.build(SHAPE, "meta"), "dp=1", rule, clip=1.0, options=options, loss_scale=scale)
        seen: list[float] = []
        while len(seen) < STEPS:
            result = engine.step(batch(seed, len(seen)))
            seen += [] if result.skipped else [result.loss]
            skipped += result.skipped
        found.append(statistics.mean(seen[-5:]))
    return found, skipped


def test_the_lm_heads_gradient_does_not_accumulate_in_float16():
    """It is made before the loss scale is known: a sum over many rows that overflows would do so at every scale."""

    def losses(logits, targets, backward):
        wide = torch.softmax(logits.float(), dim=-1)
        found = -wide[torch.arange(len(wide)), targets].log()
        wide[torch.arange(len(wide)), targets] -= 1.0
        logits.copy_(wide)
        return found

    x, targets = torch.full((20_000, 4), 8.0, dtype=torch.float16), torch.zeros(20_000, dtype=torch.int64)
    weight = torch.zeros(3, 4, dtype=torch.float16)
    _, _, dw, _ = chunked_cross_entropy(x, weight, targets, losses, chunk_tokens=1 << 20, backward=True)
    assert dw.dtype == torch.float32
    assert float(dw[0, 0]) < -1e5


def test_float16_learns_what_float32_learns(pool):
    ((truth, none),) = pool.run(losses, 1, torch.float32, 0)
    ((half, skipped),) = pool.run(losses, 1, torch.float16, 10)
    assert none == 0
    assert 0 < skipped < STEPS // 2, "the first scale is too high on purpose"
    noise = statistics.stdev(truth)
    assert max(truth) < 3.3 - 3 * noise, "something is learned: log 31 is 3.4"
    assert all(abs(one - other) < noise / 2 for one, other in zip(half, truth, strict=True)), (half, truth)


class Far(torch.nn.Module):
    """A bias, far from every target: its gradient is the sum of as many large numbers as there are targets."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, y):
        return (self.bias - y).float().square().sum(), torch.tensor(len(y))


def test_a_first_step_without_a_scale_does_not_overflow():
    engine = Engine(Far(), "", options=ParallelOptions(compute_dtype=torch.float16))
    result = engine.step({"y": torch.full((4096,), 10.0)})
    assert not result.skipped
    assert result.norm == 20.0
