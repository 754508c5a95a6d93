"""Runs that are killed again and again at random moments, in every kind of layout: 200 kills in all.

Each attempt resumes from the newest checkpoint and is killed one to four steps later: SIGKILL to one rank or to all, in
a step's computation, after a delay, half-way through a file of a checkpoint, or in the rename that makes it exist. The
end is bit-equal to that of the run that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from echelon.faults.graceful_stop import process_is_alive
from echelon.launch.rank_failure import RankError
from tests.checkpoint.killed_runs import EVERY, train
from tests.checkpoint.test_resume import config, losses, states

KILLS, STEPS = 25, 60
CASES = {
    "dp": ("dp=2", {}),
    "zero3": ("dp=2,zero=3", {}),
    "tp": ("tp=2", {}),
    "pp": ("pp=2,accumulate=2", {}),
    "ep": ("dp=2,ep=2", {"model": "moe-tiny"}),
    "offload": ("dp=2,zero=1,offload=optimizer", {}),
    "2bw": ("pp=2,accumulate=2,schedule=2bw", {}),
    "pipedream": ("pp=2,accumulate=2,schedule=pipedream", {}),
}
MOMENTS = ("step", "delay", "delay", "write", "commit")
LAUNCHER_KILLS, LAUNCHER_STEPS = 6, 200
ORPHAN_S = 15.0


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_moments(pool, tmp_path, case):
    check_case(pool, tmp_path, case, kills=KILLS, steps=STEPS)


def check_case(pool, folder: Path, case: str, *, kills: int, steps: int) -> Counter[str]:
    """The same states and losses at the end; how often the run was killed at each moment."""
    layout, changes = CASES[case]
    given = {"steps": steps, "checkpoint.every": 1, **changes}
    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    whole = pool.run(train, 2, config(folder / "whole", layout, **given), timeout=900)[0]
    asked, run, source = config(folder / "killed", layout, **given), folder / "killed" / "run", random.Random(case)
    moments: Counter[str] = Counter()
    for _ in range(kills):
        saved = max(states(run), default=0) if run.exists() else 0  # every checkpoint can be opened
        step = min(saved + source.randint(1, 4), steps - 1)
        moment, rank, after = source.choice(MOMENTS), source.choice([0, 1, EVERY]), source.uniform(0.0, 0.05)
        resume = str(run) if (run / "log.jsonl").exists() else ""
        with pytest.raises(RankError, match="SIGKILL"):
            pool.run(train, 2, asked, resume, moment, rank, step, after, timeout=900)
        moments[moment] += 1
    pool.run(train, 2, asked, str(run), timeout=900)
    assert losses(run) == losses(whole["run"])
    assert states(run)[steps] == states(whole["run"])[steps]
    return moments


@pytest.mark.soak
def test_killed_launchers_leave_no_rank(pool, tmp_path):
    """SIGKILL to the launcher, with a rank that is stopped every other time: no process is left, and it resumes."""
    (tmp_path / "whole").mkdir()
    given = {"steps": LAUNCHER_STEPS, "checkpoint.every": 1}
    whole = pool.run(train, 2, config(tmp_path / "whole", **given), timeout=900)[0]
    (tmp_path / "config.toml").write_text(config(tmp_path, **given).to_toml())
    run, source = tmp_path / "run", random.Random(0)
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for number in range(LAUNCHER_KILLS + 1):
        what = ["--resume", str(run)] if (run / "log.jsonl").exists() else ["config.toml"]
        command = [sys.executable, "-m", "echelon", "train", *what, "--json", "--procs", "2"]
        with open(tmp_path / f"out{number}", "w") as out:
            launcher = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True)
        if number == LAUNCHER_KILLS:
            assert launcher.wait(900) == 0, (tmp_path / f"out{number}").read_text()
            break
        before, deadline = steps_logged(run), time.monotonic() + 300
        while steps_logged(run) < before + 3:
            assert launcher.poll() is None, (tmp_path / f"out{number}").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(source.uniform(0.0, 0.1))
        started = descendants(launcher.pid)
        ranks = [pid for pid in started if pid not in children(launcher.pid)]
        assert len(ranks) == 2
        if number % 2:
            os.kill(source.choice(ranks), signal.SIGSTOP)
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + ORPHAN_S
        while left := [pid for pid in started if process_is_alive(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        states(run)
    assert losses(run) == losses(whole["run"])
    assert states(run)[LAUNCHER_STEPS] == states(whole["run"])[LAUNCHER_STEPS]
    assert not list(tmp_path.glob("echelon-*"))


def steps_logged(run: Path) -> int:
    log = run / "log.jsonl"
    return log.read_text().count('"kind": "step"') if log.exists() else 0


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]
