"""Step timing, the same for us and for peers: warm-up steps, then the median of several timed ones."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.bench.measurement import Measurement

StepFunction = Callable[[], Callable[[], float]]
"""runs one step and returns a function that reads its loss, which synchronizes the device"""


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    first_s: float
    """from the start of the process to the end of its first step"""
    step_s: float
    """the median"""


def time_steps(step: StepFunction, measurement: Measurement, *, process_start: float) -> StepTiming:
    """Time steps; `process_start` is by `time.monotonic`, which all processes of a machine share."""
    device = torch.device(measurement.device)
    step()
    synchronize(device)
    first = time.monotonic() - process_start
    for _ in range(measurement.warmup_steps - 1):
        step()
    synchronize(device)
    seconds = []
    for _ in range(measurement.timed_steps):
        seconds_once, read = _time_once(step, device)
        seconds.append(seconds_once)
    loss, steps = read(), measurement.warmup_steps + measurement.timed_steps
    if not math.isfinite(loss):
        raise ValueError(f"the loss is not finite (loss={loss} after {steps} steps)")
    return StepTiming(first_s=first, step_s=statistics.median(seconds))


def _time_once(step: StepFunction, device: torch.device) -> tuple[float, Callable[[], float]]:
    if device.type != "cuda":
        start = time.perf_counter()
        read = step()
        return time.perf_counter() - start, read
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    read = step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3, read


def training_step(model: torch.nn.Module, compute_loss: Callable[[], Tensor]) -> StepFunction:
    """A step of a plain training loop: fused AdamW, with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> Callable[[], float]:
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss.item

    return step


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_tokens(measurement: Measurement) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, [batch, seq_len], drawn from the full vocabulary, on the device."""
    shape = (measurement.batch, measurement.seq_len)
    generator = torch.Generator(device=measurement.device).manual_seed(0)
    draw = partial(torch.randint, 0, measurement.model.vocab, shape, generator=generator, device=measurement.device)
    return draw(), draw()
