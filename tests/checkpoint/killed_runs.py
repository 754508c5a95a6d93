"""Runs for the ranks of the pool that are killed in the middle of an operation."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch.distributed as dist

from echelon.checkpoint.storage import LocalStorage
from echelon.config.run_config import Config
from echelon.training.engine import Engine
from echelon.training.loop import train_on_rank

EVERY = -1
"""in place of a rank"""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    config: Config, resume: str = "", moment: str = "", rank: int = 0, step: int = 0, after: float = 0.0
) -> dict[str, Any]:
    """With a moment, this rank is killed in that step: in its computation, half-way through its file, or in the rename
    that makes a checkpoint exist; or this number of seconds after the step began ("delay"). A rank that does nothing of
    the kind in that step is killed in the next."""
    mine = rank in (dist.get_rank(), EVERY)
    timer = threading.Timer(after, die)
    run, write, commit = Engine.step_microbatches, LocalStorage.write, LocalStorage.commit

    def run_or_die(self, *args, **kwargs):
        current = self.num_steps + 1
        if mine and moment == "delay" and current == step:
            timer.start()
        elif mine and moment and current >= step + (moment != "step"):
            die()
        return run(self, *args, **kwargs)

    def write_or_die(self, at, name, file, *until):
        if mine and moment == "write" and at == step:
            write(self, at, name, memoryview(file).cast("B")[: len(file) // 2])
            die()
        write(self, at, name, file, *until)

    def commit_or_die(self, at):
        if mine and moment == "commit" and at == step:
            die()
        commit(self, at)

    Engine.step_microbatches, LocalStorage.write, LocalStorage.commit = run_or_die, write_or_die, commit_or_die
    try:
        return train_on_rank(config, True, resume=resume).log_fields()
    finally:
        timer.cancel()
        Engine.step_microbatches, LocalStorage.write, LocalStorage.commit = run, write, commit
