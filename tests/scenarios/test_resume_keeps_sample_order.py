"""A million samples, shuffled; a run that stops at step 7 on four ranks resumes on two and on three."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.config.run_config import Config
from echelon.data import TokenDataset
from echelon.data.sample_order import epoch_and_sample
from echelon.launch.world import join_process_group
from echelon.training.engine import Engine
from echelon.training.loop import train_on_rank
from echelon.training.run.resume import resumed_config
from echelon.training.run.run_checkpoints import RunCheckpoints
from echelon.training.run.run_dir import Run
from echelon.training.task import build_task

SAMPLES, LENGTH, BATCH = 1_000_000, 8, 12
STOP, MORE = 7, 3
EPOCH = SAMPLES // BATCH
"""steps; in the middle of the one after it, the second epoch begins"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Bytes are tokens: a token more than the samples have, and the end of the only document."""
    path = tmp_path_factory.mktemp("million") / "text.txt"
    letters = np.random.default_rng(0).integers(97, 123, SAMPLES * LENGTH, np.uint8)
    path.write_bytes(letters.tobytes())
    return path


def config(text: Path, run: Path, layout: str, steps: int) -> Config:
    settings = {
        "data.path": json.dumps([str(text)]),
        "data.eval_fraction": 0,
        "seq_len": LENGTH,
        "batch": BATCH,
        "steps": steps,
        "layout": layout,
        "eval.every": 0,
        "sample.tokens": 0,
        "checkpoint.every": 10**9,
        "device": "cpu",
        "run": run,
    }
    return Config.load(None, [f"{key}={value}" for key, value in settings.items()])


def stopped_late(config: Config, step: int) -> None:
    """Write the run and the checkpoint of a run that stopped after a step."""
    with join_process_group("cpu") as world:
        task = build_task(config, nullcontext())
        engine = Engine(task.build(), config.layout, config.optimizer)
        run = Run.create(config, {}) if world.rank == 0 else None
        checkpoints = RunCheckpoints(config, engine, run, resuming=False)
        engine.num_steps = step
        checkpoints.after_step(step, last=True)
        checkpoints.finish()
        checkpoints.close()


def seen(config: Config, resume: str = "") -> dict[str, Any]:
    """Trains. Which (epoch, sample) this rank read, and how long that took from opening the file to the first batch."""
    found: list[tuple[int, int]] = []
    times: list[float] = []
    opened, batch = TokenDataset.__init__, TokenDataset.batch

    def open_(self, *args, **kwargs):
        times.append(time.process_time())
        opened(self, *args, **kwargs)
        assert self.num_train == SAMPLES
        times.append(time.process_time())

    def read(self, indices):
        begun = time.process_time()
        got, where = batch(self, indices), self.locate(indices)
        times.append(time.process_time() - begun)
        found.extend(zip(where.epoch.tolist(), where.sample.tolist(), strict=True))
        return got

    TokenDataset.__init__, TokenDataset.batch = open_, read
    try:
        run = train_on_rank(config, True, resume=resume).run
    finally:
        TokenDataset.__init__, TokenDataset.batch = opened, batch
    return {"samples": found, "run": run, "seconds": times[1] - times[0] + times[2]}


def together(ranks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [sample for rank in ranks for sample in rank["samples"]]


def due(first: int, last: int) -> list[tuple[int, int]]:
    """Of the steps after one, up to another: from the order, which tests/data pins."""
    epochs, samples = epoch_and_sample(np.arange(first * BATCH, last * BATCH), num_samples=SAMPLES, seed=0)
    return list(zip(epochs.tolist(), samples.tolist(), strict=True))


@pytest.mark.parametrize(("layout", "ranks"), [("dp=2", 2), ("dp=3,zero=1", 3)])
def test_the_same_samples_none_twice_none_lost(pool, tmp_path, text, layout, ranks):
    first = pool.run(seen, 4, config(text, tmp_path / "run", "dp=4", STOP))
    resumed = resumed_config(tmp_path / "run", [f"steps={STOP + MORE}", f"layout={layout}"])
    second = pool.run(seen, ranks, resumed, str(tmp_path / "run"))
    assert sorted(together(first)) == sorted(due(0, STOP))
    assert sorted(together(second)) == sorted(due(STOP, STOP + MORE))
    every = together(first) + together(second)
    assert len(set(every)) == len(every) == (STOP + MORE) * BATCH
    assert max(rank["seconds"] for rank in second) < 1.0


@pytest.mark.parametrize(("layout", "ranks"), [("dp=2", 2), ("dp=3", 3)])
def test_also_where_the_second_epoch_begins(pool, tmp_path, text, layout, ranks):
    """The run is taken for one that has done all but the last whole step of the first epoch."""
    pool.run(stopped_late, 4, config(text, tmp_path / "run", "dp=4", EPOCH), EPOCH - 1)
    resumed = resumed_config(tmp_path / "run", [f"steps={EPOCH + MORE}", f"layout={layout}"])
    second = pool.run(seen, ranks, resumed, str(tmp_path / "run"))
    assert sorted(together(second)) == sorted(due(EPOCH - 1, EPOCH + MORE))
    assert {epoch for epoch, _ in together(second)} == {0, 1}
    assert max(rank["seconds"] for rank in second) < 1.0
