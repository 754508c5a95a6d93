"""One measurement of step time: `python -m echelon.bench.measure_step MEASUREMENT` prints one JSON object."""

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


def measure_step(measurement: Measurement, process_start: float) -> BenchResult:
    step, package = _prepare_step(measurement)
    timing = time_steps(step, measurement, process_start=process_start)
    return {
        "step_s": timing.step_s,
        "first_step_s": timing.first_s,
        "peak_bytes": peak_memory(torch.device(measurement.device)),
        "version": f"{package} {_version(package)}",
        "torch": torch.__version__,
    }


def _prepare_step(measurement: Measurement) -> tuple[StepFunction, str]:
    """The step to time, and the name of its package."""
    if measurement.who == ECHELON:
        return echelon_step.prepare(measurement), ECHELON
    peer = find_peer(measurement.who, measurement.precision)
    module = importlib.import_module(f"echelon.bench.peers.{peer.name}")
    return getattr(module, peer.prepare)(measurement), peer.packages[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # unpacked without its metadata, or a source checkout
        return "of unknown version"


if __name__ == "__main__":
    subprocess_main(measure_step)
