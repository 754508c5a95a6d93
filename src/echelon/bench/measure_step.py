"""One measurement: `python -m echelon.bench.measure_step REQUEST` prints what steps of the request take, as one JSON object."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch

from echelon.bench import echelon_step
from echelon.bench.measurement import ECHELON, Measurement
from echelon.bench.peers import find_peer
from echelon.bench.step_timing import StepFunction, time_steps
from echelon.bench.subprocess_bench import BenchResult, subprocess_main
from echelon.training.logging.metrics import peak_memory


def measure_step(request: Measurement, process_start: float) -> BenchResult:
    step, package = _prepare_step(request)
    timing = time_steps(step, request, process_start=process_start)
    return {
        "step_s": timing.step_s,
        "first_step_s": timing.first_s,
        "peak_bytes": peak_memory(torch.device(request.device)),
        "version": f"{package} {_version(package)}",
        "torch": torch.__version__,
    }


def _prepare_step(request: Measurement) -> tuple[StepFunction, str]:
    """The step, and the package that it is of."""
    if request.who == ECHELON:
        return echelon_step.prepare(request), ECHELON
    peer = find_peer(request.who, request.precision)
    prepare = importlib.import_module(f"echelon.bench.peers.{peer.module}").prepare
    return prepare(request), peer.packages[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a folder without its wheel's notes, or our own source
        return "of unknown version"


if __name__ == "__main__":
    subprocess_main(measure_step)
