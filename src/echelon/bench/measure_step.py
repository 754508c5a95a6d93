"""One measurement: `python -m echelon.bench.measure_step REQUEST` prints what steps of the request take, as one JSON object."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch

from echelon.bench import echelon_step
from echelon.bench.measurement import US, Request
from echelon.bench.peers import peer_of
from echelon.bench.step_timing import Step, timed
from echelon.bench.subprocess_bench import Found, answer
from echelon.training.logging.metrics import peak_memory


def measured(request: Request, begun: float) -> Found:
    step, package = _prepared(request)
    timing = timed(step, request, begun=begun)
    return {
        "step_s": timing.step_s,
        "first_step_s": timing.first_s,
        "peak_bytes": peak_memory(torch.device(request.device)),
        "version": f"{package} {_version(package)}",
        "torch": torch.__version__,
    }


def _prepared(request: Request) -> tuple[Step, str]:
    """The step, and the package that it is of."""
    if request.who == US:
        return echelon_step.prepare(request), US
    peer = peer_of(request.who, request.precision)
    prepare = importlib.import_module(f"echelon.bench.peers.{peer.module}").prepare
    return prepare(request), peer.needs[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a folder without its wheel's notes, or our own source
        return "of unknown version"


if __name__ == "__main__":
    answer(measured)
