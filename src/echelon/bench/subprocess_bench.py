"""A measurement in a process of its own, seen from both sides.

A fresh process has no memory, compiled code or settings of the last one, and its start-up is a user's. It prints one
line, a JSON object, whatever happens in it: a measurement that fails is a result too, with its reason in words.
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
"""seconds that a measurement may take"""
BenchResult = dict[str, Any]
"""what a process says: its numbers, or the one key `failed` with the reason"""


def run_in_subprocess(module: str, measurement: Measurement, *, limit: float = TIME_LIMIT) -> BenchResult:
    """Runs `module` on the request in a new process, and returns what it says."""
    # Files, not pipes: compilers that the process started may outlive it, and would hold a pipe open.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+", errors="replace") as told:
        command = [sys.executable, "-m", module, measurement.to_line(), repr(time.monotonic())]
        try:
            code = subprocess.run(command, stdout=said, stderr=told, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s"}
        said.seek(0)
        told.seek(0)
        if line := said.read().strip():
            found: BenchResult = json.loads(line)
            return found
        last = ([line for line in told.read().splitlines() if line.strip()] or ["it printed nothing"])[-1]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return {"failed": f"the process {how}: {last.strip()}"}


def subprocess_main(measure: Callable[[Measurement, float], BenchResult]) -> None:
    """The whole life of such a process: `work` is given the request and the time at which the process was started."""
    own = time.monotonic()
    request, begun = Measurement.from_line(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else own
    # What libraries print must not get between the lines of the answer.
    line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if request.peer_folder:
        sys.path.insert(0, request.peer_folder)
    try:
        found = measure(request, begun)
    except Exception as error:
        traceback.print_exc()
        found = {"failed": describe_error(error)}
    print(json.dumps(found), file=line, flush=True)


def describe_error(error: Exception) -> str:
    """What went wrong, on one line."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        used, most = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
        return f"out of memory ({used / 2**30:.1f} GiB of {most / 2**30:.1f} were in use)"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"
