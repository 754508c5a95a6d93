"""Two elastic agents on loopback as two machines; one is lost for good, and the other resumes alone."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cpu_clock import patient

from echelon.layout import Layout
from echelon.training.loop import train_on_rank
from tests.training.elastic.test_attempts import are_equal, config, records

PATIENCE = 600.0
"""seconds: the machine may have much else to do"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agent(folder: Path, port: int, *, is_host: bool) -> subprocess.Popen[bytes]:
    """torchrun with two ranks."""
    # An agent that does not get to run for so long is taken for dead.
    seen = f"keep_alive_interval={math.ceil(patient(1.0))},keep_alive_max_attempt=3,last_call_timeout=1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one-job"]
    command += [f"--rdzv-conf=is_host={int(is_host)},{seen}", "--local-addr=127.0.0.1"]
    command += ["-m", "echelon", "train", "config.toml"]
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))  # as it is here, wherever the ranks are
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(folder / f"agent{int(is_host)}.log", "wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def ended(process: subprocess.Popen[bytes]) -> None:
    """With its ranks, which are in sessions of their own."""
    for pid in [process.pid, *(ranks_of(process) if process.poll() is None else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.soak
def test_the_run_continues_after_the_loss_of_a_machine(pool, tmp_path):
    (tmp_path / "one").mkdir()
    pool.run(train_on_rank, 4, config(tmp_path / "one", "dp=4", batch=4), True)
    asked = config(tmp_path, "dp=4", batch=4, **{"elastic.replan": "true"})
    (tmp_path / "config.toml").write_text(asked.to_toml())
    run, port = tmp_path / "run", free_port()
    stays, goes = agent(tmp_path, port, is_host=True), agent(tmp_path, port, is_host=False)
    try:
        log, deadline = run / "log.jsonl", time.monotonic() + PATIENCE
        while not (log.exists() and '"kind": "step", "step": 4,' in log.read_text()):
            assert time.monotonic() < deadline, (tmp_path / "agent1.log").read_text()
            assert stays.poll() is None, (tmp_path / "agent1.log").read_text()
            time.sleep(0.02)
        ended(goes)
        assert stays.wait(PATIENCE) == 0, (tmp_path / "agent1.log").read_text()
    finally:
        ended(stays)
        ended(goes)
    assert are_equal(run, tmp_path / "one" / "run")
    (change,) = records(run, "replan")
    assert (change["from"], change["why"]) == ("dp=4", "2 ranks are left")
    assert Layout.parse(change["to"]).world == 2
    assert [record["number"] for record in records(run, "restart")] == [1]
    assert not (tmp_path / "run-2").exists()
