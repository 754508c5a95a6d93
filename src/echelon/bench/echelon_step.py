"""Our own step, as `echelon train` does it on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon import models
from echelon.bench.measurement import Measurement
from echelon.bench.step_timing import StepFunction, random_tokens
from echelon.config.sections import OptimizerConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp8-row": torch.bfloat16,
}
"""the type of parameters and activations; products in 8 bits are asked for beside it"""


def prepare(request: Measurement) -> StepFunction:
    products: dict[str, Any] = {"products": request.precision} if request.precision.startswith("fp8") else {}
    states: dict[str, Any] = {"states": request.states} if request.states != "float32" else {}
    options = ParallelOptions(
        device=torch.device(request.device),
        compute_dtype=COMPUTE_DTYPES[request.precision],
        master_dtype=torch.float32,
        **products,
    )
    rule = OptimizerConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **states)
    layout = f"dp=1,microbatch={request.batch},recompute={request.recompute}"
    engine = Engine(models.build(request.model, "meta"), layout, rule, clip=1.0, options=options)
    engine.model.train()
    tokens, targets = random_tokens(request)
    batch = {"tokens": tokens, "targets": targets}

    def step() -> Callable[[], float]:
        result = engine.step(batch)
        return lambda: result.loss

    return step
