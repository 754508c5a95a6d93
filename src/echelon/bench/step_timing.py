"""How a step is timed, ours and a peer's alike: some to warm up, then the median of several, one after the other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.bench.measurement import Measurement

StepFunction = Callable[[], Callable[[], float]]
"""does one step; what it returns reads the step's loss, which waits for the device"""


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    first_s: float
    """from the start of the process to the end of its first step"""
    step_s: float
    """the median"""


def time_steps(step: StepFunction, request: Measurement, *, process_start: float) -> StepTiming:
    """`begun` is when the process was started, by `time.monotonic`, which all processes of a machine share."""
    device = torch.device(request.device)
    step()
    synchronize(device)
    first = time.monotonic() - process_start
    for _ in range(request.warmup_steps - 1):
        step()
    synchronize(device)
    seconds = []
    for _ in range(request.timed_steps):
        once, read = _time_once(step, device)
        seconds.append(once)
    loss = read()
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is not finite (loss={loss} after {request.warmup_steps + request.timed_steps} steps)"
        )
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


def synchronize(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_tokens(request: Measurement) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, [batch, seq_len], of the whole vocabulary and on the device already."""
    shape = (request.batch, request.seq_len)
    made = torch.Generator(device=request.device).manual_seed(0)
    tokens, targets = (
        torch.randint(0, request.model.vocab, shape, generator=made, device=request.device) for _ in range(2)
    )
    return tokens, targets
