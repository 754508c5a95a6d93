"""What of an engine a checkpoint holds, and how an engine gets it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.checkpoint_index import CheckpointError
from echelon.checkpoint.coordination import Together, agree
from echelon.checkpoint.load import Loaded, load
from echelon.checkpoint.save import Keep, Saver
from echelon.checkpoint.storage import storage_of
from echelon.checkpoint.training_state import Number, State
from echelon.pipeline.async_.async_runtime import StreamRuntime
from echelon.training.engine import Engine


def state_of(engine: Engine) -> State:
    """One rank's part of everything that a step reads and changes."""
    numbers = {
        "last_count": _kept(torch.float64, lambda: engine.last_count),
        "loss_scale": _kept(torch.float64, lambda: engine.scaling.value),
        "good_steps": _kept(torch.int64, lambda: engine.scaling.good),
    }
    runtime = engine.pipeline.runtime if engine.pipeline is not None else None
    if isinstance(runtime, StreamRuntime):
        numbers["seed"] = _seed_of(runtime)
    return State(engine.parallel, engine.optimizer, engine.average, numbers)


def _kept(dtype: torch.dtype, of: Callable[[], Tensor]) -> Number:
    def write(values: Tensor) -> None:
        of().copy_(values.view(()))

    return Number(dtype, of, write)


def _seed_of(runtime: StreamRuntime) -> Number:
    """What backward starts from in an asynchronous schedule."""

    def write(values: Tensor) -> None:
        runtime.seed = float(values)

    return Number(torch.float64, lambda: torch.tensor(runtime.seed, dtype=torch.float64), write)


class Saving:
    """An engine's checkpoints in one place."""

    def __init__(self, engine: Engine, address: str, *, keep: Keep | None = None):
        """`address` is the first rank's: a folder, or what fsspec knows."""
        self._engine, self._keep = engine, keep
        self._together = Together()
        self._storage = storage_of(self._together.told(address))
        self._saver: Saver | None = None

    def save(self, facts: Mapping[str, Any]) -> None:
        """Of the state after the last step. What is under way on the host or in a pipeline is ended first."""
        engine, saver = self._engine, self._ready()
        engine.drain()
        engine.settle = saver.settle
        saver.save(engine.num_steps, {**facts, "step": engine.num_steps}, behind=engine.updates_last)

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, as the first rank sees it."""
        found: list[int] = []
        error: Exception | None = None
        try:
            found = self._storage.steps() if self._together.is_first else []
        except CheckpointError as wrong:
            error = wrong
        agree(self._together, error)
        return self._together.told(found)

    def load(self, step: int) -> Loaded:
        """The engine goes on after that step."""
        self.wait()
        self._engine.drain()
        found = load(state_of(self._engine), self._storage, step, self._together)
        self._engine.num_steps = step
        return found

    def set_aside(self, after: int) -> list[int]:
        """Checkpoints of later steps than the one a run goes on from are not of this run; gives their steps."""
        later = [step for step in self.steps() if step > after]
        error: Exception | None = None
        try:
            for step in later if self._together.is_first else ():
                self._storage.set_aside(step)
        except CheckpointError as found:
            error = found
        agree(self._together, error)
        return later

    def check(self) -> None:
        """Raises what went wrong in the background."""
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Until the last save is through."""
        if self._saver is not None:
            self._saver.wait()

    @property
    def nbytes(self) -> int:
        """of this rank's part"""
        return self._saver.nbytes if self._saver is not None else 0

    @property
    def last(self) -> str | None:
        """address of the newest checkpoint that this run has written"""
        return self._saver.last if self._saver is not None else None

    @property
    def hash(self) -> str:
        """of its state"""
        return self._saver.hash if self._saver is not None else ""

    def close(self) -> None:
        if self._saver is None or self._saver.close():
            self._together.close()

    def _ready(self) -> Saver:
        if self._saver is None:
            device = self._engine.parallel.options.device
            self._saver = Saver(state_of(self._engine), self._storage, self._together, device=device, keep=self._keep)
        return self._saver
