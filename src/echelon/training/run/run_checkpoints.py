"""A run's checkpoints, as the loop uses them: when one is due, which was written last, which one is restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.checkpoint.checkpoint_index import abbreviate
from echelon.checkpoint.load import LoadResult
from echelon.checkpoint.save import RetentionPolicy
from echelon.config.run_config import Config
from echelon.training.engine import Engine
from echelon.training.engine_state import EngineCheckpointer
from echelon.training.run.resume import CHECKPOINTS_DIR
from echelon.training.run.run_dir import Run


class RunCheckpoints:
    """Saves and restores the checkpoints of a run; does nothing where none is written and none is read."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        run: Run | None,
        *,
        resuming: bool,
        extra_facts: Callable[[int], Mapping[str, Any]] = lambda step: {},
    ):
        """`run` is open on rank 0 only; `extra_facts` returns what the checkpoint of a step holds besides its state."""
        self._config, self._engine, self._run, self._extra_facts = config, engine, run, extra_facts
        self._opened: EngineCheckpointer | None = None
        self._logged_address: str | None = None
        self._blocked_s = 0.0
        self._last_saved_step = 0
        self.address = config.checkpoint.path or str((run.path if run is not None else Path()) / CHECKPOINTS_DIR)
        path = config.checkpoint.path
        if config.checkpoint.every or path or resuming:
            _ = self._checkpointer  # an unusable address is refused before the first step
        if path and not resuming and (steps := self._checkpointer.steps()):  # this run would delete or load them
            raise ValueError(
                f"checkpoint.path={path} has checkpoints of another run (steps {abbreviate([*map(str, steps)])}); "
                "resume that run (--resume RUN), or set another path"
            )

    @property
    def _checkpointer(self) -> EngineCheckpointer:
        """Opened by its first use, on all ranks together."""
        if self._opened is None:
            keep = RetentionPolicy(last=self._config.checkpoint.keep, every=self._config.checkpoint.keep_every)
            self._opened = EngineCheckpointer(self._engine, self.address, keep=keep)
        return self._opened

    def restore(self, step: int | None) -> LoadResult | None:
        """Load the newest checkpoint, or that of a step; return None where none exists yet."""
        steps = self._checkpointer.steps()
        if step is None and not steps:
            return None
        if step is not None and step not in steps:
            existing = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"no checkpoint of that step exists (step {step}; existing: {existing})")
        loaded = self._checkpointer.load(steps[-1] if step is None else step)
        if step is not None:
            self._checkpointer.set_aside(step)
        return loaded

    def roll_back(self, before_step: int) -> LoadResult:
        """Load the newest checkpoint before a step, and set later ones aside."""
        self._checkpointer.wait()
        steps = [step for step in self._checkpointer.steps() if step < before_step]
        if not steps:
            raise ValueError(f"no checkpoint to roll back to exists (before step {before_step})")
        loaded = self._checkpointer.load(steps[-1])
        self._checkpointer.set_aside(steps[-1])
        return loaded

    def save_now(self, step: int) -> None:
        """Save, and wait until the checkpoint exists."""
        self._save(step)
        self._checkpointer.wait()

    def is_due(self, step: int, *, last: bool) -> bool:
        every = self._config.checkpoint.every
        return bool(every) and (step % every == 0 or last)

    def after_step(self, step: int, *, last: bool) -> None:
        """Raise errors of background saves, and save if it is due."""
        if self._config.checkpoint.every:
            self._checkpointer.check()
            self._log_finished_save()
        if self.is_due(step, last=last):
            self._save(step)

    def save_at_stop(self, step: int) -> None:
        """Save a run that stops before its end, even with checkpoint.every=0."""
        if self._last_saved_step != step:
            self._save(step)

    def finish(self) -> str | None:
        """Wait for the last save; return its address."""
        if self._opened is None:
            return None
        self._opened.wait()
        self._log_finished_save()
        return self._logged_address

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _save(self, step: int) -> None:
        start, config = time.perf_counter(), self._config
        facts = {"seed": config.seed, "samples": step * config.batch, "layout": str(self._engine.layout)}
        with self._engine.recorder.phase_scope("save"):
            self._checkpointer.wait()
            self._log_finished_save()
            self._checkpointer.save({**facts, "config": config.to_toml(), **self._extra_facts(step)})
        self._blocked_s, self._last_saved_step = time.perf_counter() - start, step

    def _log_finished_save(self) -> None:
        saver = self._checkpointer.saver
        if saver is None or saver.last_address in (None, self._logged_address):
            return
        self._logged_address = saver.last_address
        if self._run is not None:
            saved = {"path": saver.last_address, "hash": saver.hash, "bytes": saver.nbytes}
            self._run.log("checkpoint", **saved, blocked_s=self._blocked_s)
