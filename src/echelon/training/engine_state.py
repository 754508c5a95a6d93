"""What of an engine a checkpoint holds, and how an engine gets it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.checkpoint_index import CheckpointError
from echelon.checkpoint.coordination import CheckpointGroup, raise_on_all_ranks
from echelon.checkpoint.load import LoadResult, load_checkpoint
from echelon.checkpoint.save import CheckpointSaver, RetentionPolicy
from echelon.checkpoint.storage import open_storage
from echelon.checkpoint.training_state import ScalarState, TrainingState
from echelon.pipeline.execution.runtime import PipelineRuntime
from echelon.training.engine import Engine


def training_state(engine: Engine) -> TrainingState:
    """One rank's part of everything that a step reads and changes."""
    numbers = {
        "last_count": _tensor_number(torch.float64, lambda: engine.normalizer.last_num_targets),
        "loss_scale": _tensor_number(torch.float64, lambda: engine.normalizer.loss_scaler.scale),
        "good_steps": _tensor_number(torch.int64, lambda: engine.normalizer.loss_scaler.good_steps),
    }
    if engine.pipeline is not None and engine.pipeline.asynchronous:
        numbers["seed"] = _backward_seed_number(engine.pipeline.runtime)
    return TrainingState(engine.parallel, engine.optimizer, engine.ema, numbers)


def _tensor_number(dtype: torch.dtype, of: Callable[[], Tensor]) -> ScalarState:
    def write(values: Tensor) -> None:
        of().copy_(values.view(()))

    return ScalarState(dtype, of, write)


def _backward_seed_number(runtime: PipelineRuntime) -> ScalarState:
    """What backward starts from in an asynchronous schedule."""

    def write(values: Tensor) -> None:
        runtime.grad_seed = float(values)

    return ScalarState(torch.float64, lambda: torch.tensor(runtime.grad_seed, dtype=torch.float64), write)


class EngineCheckpointer:
    """An engine's checkpoints in one place."""

    def __init__(self, engine: Engine, address: str, *, keep: RetentionPolicy | None = None):
        """`address` is the first rank's: a folder, or what fsspec knows."""
        self._engine, self._keep = engine, keep
        self._together = CheckpointGroup()
        self._storage = open_storage(self._together.broadcast(address))
        self._saver: CheckpointSaver | None = None

    def save(self, facts: Mapping[str, Any]) -> None:
        """Of the state after the last step. What is under way on the host or in a pipeline is ended first."""
        engine, saver = self._engine, self._get_saver()
        engine.drain()
        engine.before_update = saver.wait_before_update
        saver.save(engine.num_steps, {**facts, "step": engine.num_steps}, in_background=engine.updates_after_backward)

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, as the first rank sees it."""
        found: list[int] = []
        error: Exception | None = None
        try:
            found = self._storage.steps() if self._together.is_rank_zero else []
        except CheckpointError as wrong:
            error = wrong
        raise_on_all_ranks(self._together, error)
        return self._together.broadcast(found)

    def load(self, step: int) -> LoadResult:
        """The engine goes on after that step."""
        self.wait()
        self._engine.drain()
        found = load_checkpoint(training_state(self._engine), self._storage, step, self._together)
        self._engine.num_steps = step
        return found

    def set_aside(self, after: int) -> list[int]:
        """Checkpoints of later steps than the one a run goes on from are not of this run; gives their steps."""
        later = [step for step in self.steps() if step > after]
        error: Exception | None = None
        try:
            for step in later if self._together.is_rank_zero else ():
                self._storage.set_aside(step)
        except CheckpointError as found:
            error = found
        raise_on_all_ranks(self._together, error)
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
    def last_address(self) -> str | None:
        """address of the newest checkpoint that this run has written"""
        return self._saver.last_address if self._saver is not None else None

    @property
    def hash(self) -> str:
        """of its state"""
        return self._saver.hash if self._saver is not None else ""

    def close(self) -> None:
        if self._saver is None or self._saver.close():
            self._together.close()

    def _get_saver(self) -> CheckpointSaver:
        if self._saver is None:
            device = self._engine.parallel.options.device
            self._saver = CheckpointSaver(
                training_state(self._engine), self._storage, self._together, device=device, retention=self._keep
            )
        return self._saver
