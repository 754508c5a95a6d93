"""Echelon's step, as `echelon train` runs it on one device."""

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

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp8-row": torch.bfloat16}
"""the dtype of parameters and activations; fp8 matmuls are an option of their own"""


def prepare(measurement: Measurement) -> StepFunction:
    is_fp8 = measurement.precision.startswith("fp8")
    states: dict[str, Any] = {"states": measurement.states} if measurement.states != "float32" else {}
    options = ParallelOptions(
        device=torch.device(measurement.device),
        compute_dtype=COMPUTE_DTYPES[measurement.precision],
        master_dtype=torch.float32,
        matmul_precision=measurement.precision if is_fp8 else "same",
    )
    rule = OptimizerConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **states)
    layout = f"dp=1,microbatch={measurement.batch},recompute={measurement.recompute}"
    engine = Engine(models.build(measurement.model, "meta"), layout, rule, clip=1.0, options=options)
    engine.model.train()
    tokens, targets = random_tokens(measurement)
    batch = {"tokens": tokens, "targets": targets}

    def step() -> Callable[[], float]:
        result = engine.step(batch)
        return lambda: result.loss

    return step
