"""Measurements in subprocesses: `run_in_subprocess` starts one, `subprocess_main` is its main function.

A new process inherits no memory, compiled code or settings from the last one, and its start-up time is what a user
sees. It prints one JSON object, also when it fails: then with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.bench.measurement import Measurement

TIME_LIMIT = 900.0
"""seconds"""
BenchResult = dict[str, Any]
"""measured values, or the key `failed` with the reason"""


def run_in_subprocess(module: str, measurement: Measurement, *, limit: float = TIME_LIMIT) -> BenchResult:
    """Run `module` on a measurement in a new process, and return its result."""
    # Files, not pipes: compilers that the process started may outlive it and hold a pipe open.
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+", errors="replace") as stderr:
        command = [sys.executable, "-m", module, measurement.to_line(), repr(time.monotonic())]
        try:
            code = subprocess.run(command, stdout=stdout, stderr=stderr, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s"}
        stdout.seek(0)
        stderr.seek(0)
        if line := stdout.read().strip():
            result: BenchResult = json.loads(line)
            return result
        last = ([line for line in stderr.read().splitlines() if line.strip()] or ["it printed nothing"])[-1]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return {"failed": f"the process {how}: {last.strip()}"}


def subprocess_main(measure: Callable[[Measurement, float], BenchResult]) -> None:
    """Measure what the command line asks for, from the start time that it gives, and print the result."""
    now = time.monotonic()
    measurement, process_start = Measurement.from_line(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else now
    # Libraries that print must not disturb the result on stdout.
    line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if measurement.peer_folder:
        sys.path.insert(0, measurement.peer_folder)
    try:
        result = measure(measurement, process_start)
    except Exception as error:
        traceback.print_exc()
        result = {"failed": describe_error(error)}
    print(json.dumps(result), file=line, flush=True)


def describe_error(error: Exception) -> str:
    """An error on one line."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        used, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
        return f"out of memory ({used / 2**30:.1f} GiB of {total / 2**30:.1f} were in use)"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"
