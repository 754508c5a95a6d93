"""One run, killed repeatedly at random moments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from echelon.launch.rank_failure import RankError
from tests.checkpoint.killed_runs import EVERY, train
from tests.checkpoint.test_resume import config, losses, states

KILLS, STEPS = 30, 600


@pytest.mark.soak
def test_killed_at_random_moments(pool, tmp_path):
    """SIGKILL of a random rank, or of all, saves in flight included: the same state and losses at the end."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    given = {"steps": STEPS, "checkpoint.every": 1}
    whole = pool.run(train, 2, config(tmp_path / "a", **given), timeout=600)[0]
    assert disturbed(pool, tmp_path / "b", given, KILLS, random.Random(1)) == KILLS
    assert losses(tmp_path / "b" / "run") == losses(whole["run"])
    assert states(tmp_path / "b" / "run")[STEPS] == states(whole["run"])[STEPS]


def disturbed(pool, folder: Path, given: dict[str, int], kills: int, source: random.Random) -> int:
    """Trains to the end; how many times it was killed on the way."""
    asked, run, killed = config(folder, **given), folder / "run", 0
    while True:
        resume = str(run) if (run / "log.jsonl").exists() else ""
        moment = "time" if killed < kills else ""
        rank, after = source.choice([0, 1, EVERY]), source.uniform(0.0, 0.5)
        try:
            pool.run(train, 2, asked, resume, moment, rank, 0, after, timeout=600)
        except RankError:
            killed += 1
            states(run)  # every checkpoint can be opened
            continue
        return killed
