"""No rank outlives the program that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# An unclosed pool, and ranks that would sleep for long.
SCRIPT = """
import ctypes, os, signal, sys, time
from echelon.launch.local_launcher import launch_ranks
from echelon.launch.rank_pool import RankPool

def pid():
    return os.getpid()

def sleep(name):
    with open(f"{name}{os.environ['RANK']}", "w") as file:
        file.write(f"{os.getpid()} ")
    if name == "second" and os.environ["RANK"] == "1":
        ctypes.PyDLL(None).sleep(1000)  # in C, with the GIL
    time.sleep(1000)

if __name__ == "__main__":
    # A process in the background starts with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pool = RankPool()
    print(*pool.run(pid, 2), flush=True)
    try:
        launch_ranks(sleep, ("first",), 2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    launch_ranks(sleep, ("second",), 2)
"""


def test_ctrl_c_ends_the_ranks_and_a_killed_program_leaves_none(tmp_path: Path) -> None:
    """Not even a rank that is stopped, or one that holds the GIL."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    pipe = subprocess.PIPE
    command = [sys.executable, str(script)]
    # A killed program cannot remove its temporary files; here pytest does.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            assert run.stdout is not None
            pooled = [int(pid) for pid in run.stdout.readline().split()]
            first = _started(tmp_path, "first")
            # A terminal sends it to every process.
            os.killpg(run.pid, signal.SIGINT)
            assert run.stdout.readline() == "interrupted\n"
            assert not any(map(_alive, first))
            assert all(map(_alive, pooled))
            second = _started(tmp_path, "second")
            os.kill(second[0], signal.SIGSTOP)
        finally:
            run.kill()
    assert len({*pooled, *first, *second}) == 6
    deadline = time.monotonic() + 300
    while any(map(_alive, [*pooled, *second])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _started(folder: Path, name: str) -> list[int]:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob(f"{name}?")]
        if len(texts) == 2 and all(text.endswith(" ") for text in texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def _alive(pid: int) -> bool:
    try:
        # A process that ended stays a zombie until its exit code is read.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
