"""Small runs for the ranks of the pool: some steps, a save, a load on another layout, more steps."""

from __future__ import annotations

import torch
from tiny_engines import batch_of, whole
from torch import Tensor, nn

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.models.model_config import ModelConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from echelon.training.engine import Engine
from echelon.training.engine_state import EngineCheckpointer
from echelon.training.step_result import StepResult

ROWS, WIDTH = 12, 5


class Slopes(nn.Module):
    """A model without matmuls, which not every CPU supports in bfloat16, but with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.weight = nn.Parameter(torch.randn(7, WIDTH))
        self.frozen = nn.Parameter(torch.full((7,), 0.3), requires_grad=False)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        total = (self.weight * self.norm(x)[:, None]).tanh().square().sum()
        return total.float() if x.dtype == torch.bfloat16 else total, valid.sum()


def slopes_batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return {"x": x, "valid": torch.ones(ROWS)}


def built(
    shape: ModelConfig | None,
    layout: str,
    rule: OptimizerConfig,
    *,
    options: ParallelOptions | None = None,
    scale: LossScale | None = None,
    clip: float = 1.0,
) -> Engine:
    options = options or ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    model = Slopes() if shape is None else models.build(shape, "meta", dtype=options.compute_dtype)
    engine = Engine(model, layout, rule, clip=clip, options=options, loss_scale=scale)
    engine.model.train()
    return engine


def stepped(engine: Engine, shape: ModelConfig | None, step: int) -> StepResult:
    batch = slopes_batch(step) if shape is None else batch_of(shape, ROWS, seed=step)
    return engine.step(batch, lr=0.01 * (step + 1))


def run(
    shape: ModelConfig | None,
    layout: str,
    rule: OptimizerConfig,
    folder: str,
    steps: tuple[int, int],
    *,
    resume: bool = False,
    save_at: int | None = None,
    options: ParallelOptions | None = None,
    scale: LossScale | None = None,
    clip: float = 1.0,
) -> dict[str, object]:
    """Trains from one step to another; returns the final state, assembled from all ranks."""
    engine = built(shape, layout, rule, options=options, scale=scale, clip=clip)
    saving = EngineCheckpointer(engine, folder)
    reported: dict[str, object] = {}
    if resume:
        loaded = saving.load(steps[0])
        reported |= {
            "loaded": loaded.hash,
            "stored": loaded.index.hash,
            "read": loaded.bytes_read,
            "held": loaded.bytes_held,
        }
    losses, scales = [], []
    for step in range(*steps):
        result = stepped(engine, shape, step)
        losses.append(result.loss)
        scales.append((result.loss_scale, result.next_loss_scale))
        if step + 1 == save_at:
            saving.save({})
    saving.wait()
    engine.drain()
    reported |= {
        "losses": losses,
        "scales": scales,
        "saved": saving.saver.hash if saving.saver else "",
        "values": whole(engine.parallel, "master"),
    }
    saving.close()
    engine.close()
    return reported
