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
from echelon.bench.measurement import Request
from echelon.bench.profile import kernel_classes
from echelon.bench.profile.breakdown import Breakdown, Kernel, Part
from echelon.bench.profile.kernel_trace import Shares, shares, spans
from echelon.bench.profile.roofline import Floor, floor
from echelon.bench.step_timing import Step, timed, wait
from echelon.bench.subprocess_bench import Found, answer

STEPS = 3
"""steps in the trace"""
LONGEST = 60
"""kernels that are listed by name"""
LETTERS = 160
"""of a kernel's name; templates have thousands"""


def profiled(request: Request, begun: float) -> Found:
    step = echelon_step.prepare(request)
    timing = timed(step, request, begun=begun)
    ran = spans(traced(step, torch.device(request.device)))
    if not ran:
        raise RuntimeError("the profiler saw no kernel; is another profiler at work on this device?")
    found = shares(ran)
    del step  # the floor's matrices need its memory
    gc.collect()
    if request.device == "cuda":
        torch.cuda.empty_cache()
    return asdict(breakdown(request, timing.step_s, found, floor(request), steps=STEPS))


def traced(step: Step, device: torch.device) -> Mapping[str, Any]:
    """What the profiler saw of some steps."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(STEPS):
            step()
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return found


def breakdown(request: Request, step_s: float, found: Shares, least: Floor, *, steps: int) -> Breakdown:
    """`found` is of so many steps."""
    kernels = [
        Kernel(
            name=name[:LETTERS],
            part=kernel_classes.category(name),
            calls=found.calls[name] / steps,
            seconds=seconds / steps,
        )
        for name, seconds in sorted(found.seconds.items(), key=lambda item: -item[1])
    ]
    measured = dict.fromkeys(kernel_classes.CATEGORIES, 0.0)
    for kernel in kernels:
        measured[kernel.part] += kernel.seconds
    measured[kernel_classes.IDLE] = found.idle / steps
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
        copy=least.copy,
        parts=tuple(
            Part(name=name, seconds=seconds, floor_s=least.seconds.get(name, 0.0)) for name, seconds in measured.items()
        ),
        kernels=tuple(kernels[:LONGEST]),
    )


if __name__ == "__main__":
    answer(profiled)
