"""One step, looked into: `python -m echelon.bench.profile.step_profile REQUEST` prints where its time goes, as one JSON object."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from echelon.bench import echelon_step
from echelon.bench.measurement import Measurement
from echelon.bench.profile import kernel_classes
from echelon.bench.profile.breakdown import Breakdown, KernelTime, StepPart
from echelon.bench.profile.kernel_trace import TraceShares, kernel_spans, share_time
from echelon.bench.profile.roofline import Roofline, measure_roofline
from echelon.bench.step_timing import StepFunction, synchronize, time_steps
from echelon.bench.subprocess_bench import BenchResult, subprocess_main

STEPS = 3
"""steps in the trace"""
MAX_KERNELS = 60
"""kernels that are listed by name"""
MAX_NAME_LENGTH = 160
"""of a kernel's name; templates have thousands"""


def profile_step(request: Measurement, process_start: float) -> BenchResult:
    step = echelon_step.prepare(request)
    timing = time_steps(step, request, process_start=process_start)
    ran = kernel_spans(trace_steps(step, torch.device(request.device)))
    if not ran:
        raise RuntimeError("the profiler saw no kernel; is another profiler at work on this device?")
    found = share_time(ran)
    del step  # the floor's matrices need its memory
    gc.collect()
    if request.device == "cuda":
        torch.cuda.empty_cache()
    return asdict(make_breakdown(request, timing.step_s, found, measure_roofline(request), steps=STEPS))


def trace_steps(step: StepFunction, device: torch.device) -> Mapping[str, Any]:
    """What the profiler saw of some steps."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(STEPS):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return found


def make_breakdown(
    request: Measurement, step_s: float, shares: TraceShares, roofline: Roofline, *, steps: int
) -> Breakdown:
    """`found` is of so many steps."""
    kernels = [
        KernelTime(
            name=name[:MAX_NAME_LENGTH],
            part=kernel_classes.kernel_category(name),
            calls=shares.calls[name] / steps,
            seconds=seconds / steps,
        )
        for name, seconds in sorted(shares.seconds.items(), key=lambda item: -item[1])
    ]
    measured = dict.fromkeys(kernel_classes.CATEGORIES, 0.0)
    for kernel in kernels:
        measured[kernel.part] += kernel.seconds
    measured[kernel_classes.IDLE] = shares.idle / steps
    return Breakdown(
        shape=request.shape,
        seq=request.seq_len,
        batch=request.batch,
        precision=request.precision,
        recompute=request.recompute,
        states=request.states,
        device=torch.cuda.get_device_name() if request.device == "cuda" else "this machine's processor",
        torch=torch.__version__,
        step_s=step_s,
        copy=roofline.copy_bandwidth,
        parts=tuple(
            StepPart(name=name, seconds=seconds, floor_s=roofline.seconds.get(name, 0.0))
            for name, seconds in measured.items()
        ),
        kernels=tuple(kernels[:MAX_KERNELS]),
    )


if __name__ == "__main__":
    subprocess_main(profile_step)
