"""No rank outlives the program that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A pool that nobody closes, and ranks that would sleep on.
SCRIPT = """
import os, signal, sys, time
from echelon.launch.local import start
from echelon.launch.pool import Pool

def pid():
    return os.getpid()

def sleep(folder):
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    # A process in the background starts with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pool = Pool()
    print(*pool.run(pid, 2), flush=True)
    try:
        start(sleep, (sys.argv[1],), 2)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_program(tmp_path: Path, ending: signal.Signals) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        started = _started(folder)
        if ending == signal.SIGINT:
            # A terminal sends it to every process.
            os.killpg(run.pid, ending)
        else:
            run.kill()
        out, err = run.communicate(timeout=30)
    pooled, *rest = out.splitlines()
    if ending == signal.SIGINT:
        assert (rest, err, run.returncode) == (["interrupted"], "", 0)
    pids = [*started, *map(int, pooled.split())]
    assert len(set(pids)) == 4
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _started(folder: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.iterdir()]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        # A process that ended stays as a zombie until somebody asks for its exit code.
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
