"""Profile a step: `python -m echelon.bench.profile.step_profile MEASUREMENT` prints its breakdown as JSON."""

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
"""profiled steps"""
MAX_KERNELS = 60
"""kernels listed by name"""
MAX_NAME_LENGTH = 160
"""letters of a kernel's name; those of templates have thousands"""


def profile_step(measurement: Measurement, process_start: float) -> BenchResult:
    step = echelon_step.prepare(measurement)
    timing = time_steps(step, measurement, process_start=process_start)
    device_spans = kernel_spans(trace_steps(step, torch.device(measurement.device)))
    if not device_spans:
        raise RuntimeError("the profiler saw no kernel; stop any other profiler on this device")
    shares = share_time(device_spans)
    del step  # free its memory for the matrices of the floor
    gc.collect()
    if measurement.device == "cuda":
        torch.cuda.empty_cache()
    return asdict(make_breakdown(measurement, timing.step_s, shares, measure_roofline(measurement), steps=STEPS))


def trace_steps(step: StepFunction, device: torch.device) -> Mapping[str, Any]:
    """The profiler's trace of some steps."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(STEPS):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return trace


def make_breakdown(
    measurement: Measurement, step_s: float, shares: TraceShares, roofline: Roofline, *, steps: int
) -> Breakdown:
    """The breakdown of a trace of `steps` steps."""
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
    floors = roofline.seconds
    parts = [StepPart(name=name, seconds=s, floor_s=floors.get(name, 0.0)) for name, s in measured.items()]
    return Breakdown(
        **measurement.settings,
        device=torch.cuda.get_device_name() if measurement.device == "cuda" else "this machine's CPU",
        torch=torch.__version__,
        step_s=step_s,
        copy=roofline.copy_bandwidth,
        parts=tuple(parts),
        kernels=tuple(kernels[:MAX_KERNELS]),
    )


if __name__ == "__main__":
    subprocess_main(profile_step)
