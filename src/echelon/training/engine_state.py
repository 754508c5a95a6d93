"""The training state of an engine: saving it to checkpoints and loading it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from echelon.checkpoint import frozen_weights
from echelon.checkpoint.checkpoint_index import CheckpointError
from echelon.checkpoint.coordination import CheckpointGroup, raise_on_all_ranks
from echelon.checkpoint.load import LoadResult, load_checkpoint
from echelon.checkpoint.save import CheckpointSaver, RetentionPolicy
from echelon.checkpoint.storage import open_storage
from echelon.checkpoint.training_state import ScalarState, TrainingState
from echelon.pipeline.execution.runtime import PipelineRuntime
from echelon.training.engine import Engine

T = TypeVar("T")


def training_state(engine: Engine) -> TrainingState:
    """Return one rank's part of everything that a step reads and changes."""
    scalars = {
        "last_count": _device_scalar(torch.float64, lambda: engine.normalizer.last_num_targets),
        "loss_scale": _device_scalar(torch.float64, lambda: engine.normalizer.loss_scaler.scale),
        "good_steps": _device_scalar(torch.int64, lambda: engine.normalizer.loss_scaler.good_steps),
    }
    if engine.pipeline is not None and engine.pipeline.asynchronous:
        scalars["seed"] = _async_grad_seed(engine.pipeline.runtime)
    return TrainingState(
        engine.parallel, engine.optimizer, engine.ema, scalars, has_adapters=bool(engine.adapted_linears)
    )


def _device_scalar(dtype: torch.dtype, read: Callable[[], Tensor]) -> ScalarState:
    def write(values: Tensor) -> None:
        read().copy_(values.view(()))

    return ScalarState(dtype, read, write)


def _async_grad_seed(runtime: PipelineRuntime) -> ScalarState:
    """The gradient that backward starts from in an asynchronous schedule."""

    def write(values: Tensor) -> None:
        runtime.grad_seed = float(values)

    return ScalarState(torch.float64, lambda: torch.tensor(runtime.grad_seed, dtype=torch.float64), write)


class EngineCheckpointer:
    """Saves and loads an engine's checkpoints in one storage."""

    def __init__(self, engine: Engine, address: str, *, keep: RetentionPolicy | None = None):
        """`address` is read on rank 0: a directory, or an address that fsspec supports."""
        self._engine, self._keep = engine, keep
        self._group = CheckpointGroup()
        self._storage = open_storage(self._group.broadcast(address))
        self.saver: CheckpointSaver | None = None
        """of the checkpoints that this process writes; None before the first"""
        self._frozen: dict[str, str] = {}
        """hash and dtype of the frozen weights, once they are known"""

    def save(self, facts: Mapping[str, Any]) -> None:
        """Save the state after the last step. Updates in flight, on the host or in a pipeline, finish first."""
        engine, step = self._engine, self._engine.num_steps
        if self.saver is None:
            state, device = training_state(engine), engine.parallel.options.device
            self.saver = CheckpointSaver(state, self._storage, self._group, device=device, retention=self._keep)
        engine.drain()
        if engine.adapted_linears:
            facts = {**facts, frozen_weights.FACT: self._frozen_facts()}
        engine.before_update = self.saver.wait_before_update
        self.saver.save(step, {**facts, "step": step}, in_background=engine.updates_after_backward)

    def steps(self) -> list[int]:
        """Return the steps of existing checkpoints, as rank 0 sees them."""
        return self._call_on_rank_zero(self._storage.steps) or []

    def load(self, step: int) -> LoadResult:
        """Load the state after a step."""
        self.wait()
        self._engine.drain()
        loaded = load_checkpoint(training_state(self._engine), self._storage, step, self._group)
        self._engine.num_steps = step
        if self._engine.adapted_linears:
            stored, where = loaded.index.metadata.get(frozen_weights.FACT), f"{self._storage.address}, step {step}"
            note = frozen_weights.check_frozen_hash(stored, self._frozen_facts(), where=where)
            loaded = replace(loaded, note=note)
        return loaded

    def _frozen_facts(self) -> dict[str, str]:
        """Return hash and dtype of the frozen weights, which do not change."""
        if not self._frozen:
            dtype = str(self._engine.parallel.options.compute_dtype).removeprefix("torch.")
            frozen_hash = frozen_weights.frozen_hash(training_state(self._engine), self._group)
            self._frozen = {"hash": frozen_hash, "dtype": dtype}
        return self._frozen

    def set_aside(self, after: int) -> None:
        """Set aside checkpoints of steps after the one that the run resumes from."""
        for step in self.steps():
            if step > after:
                self._call_on_rank_zero(self._storage.set_aside, step)

    def _call_on_rank_zero(self, function: Callable[..., T], *args: int) -> T | None:
        """Broadcast what `function` returns on rank 0, or raise its CheckpointError on all ranks."""
        value, error = None, None
        try:
            value = function(*args) if self._group.is_rank_zero else None
        except CheckpointError as failure:
            error = failure
        raise_on_all_ranks(self._group, error)
        return self._group.broadcast(value)

    def check(self) -> None:
        """Raise the error of a background save."""
        if self.saver is not None:
            self.saver.check()

    def wait(self) -> None:
        """Wait until the last save is complete."""
        if self.saver is not None:
            self.saver.wait()

    def close(self) -> None:
        if self.saver is None or self.saver.close():
            self._group.close()
