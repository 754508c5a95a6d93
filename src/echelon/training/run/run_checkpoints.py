"""A run's checkpoints, as the loop sees them: when one is due, what became of the last, where a resumed run goes on."""

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

LogRecord = Callable[[str, dict[str, Any]], None]
"""takes a kind of record, and what is in it"""


class RunCheckpoints:
    """Nothing at all where none are written and none is read."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        run: Path | None,
        *,
        resuming: bool,
        log: LogRecord,
        extra_facts: Callable[[int], Mapping[str, Any]] = lambda step: {},
    ):
        """`run` is the directory, on the first rank; `more` gives facts of a step that a checkpoint is to hold."""
        self._config, self._engine, self._log, self._extra_facts = config, engine, log, extra_facts
        self._checkpointer: EngineCheckpointer | None = None
        self._logged_address: str | None = None
        self._blocked_s = 0.0
        self._last_saved_step = 0
        self.address = config.checkpoint.path or str((run or Path()) / CHECKPOINTS_DIR)
        if config.checkpoint.every or config.checkpoint.path or resuming:
            self._checkpointer = self._open_checkpointer()
        if config.checkpoint.path and not resuming:
            self._refuse_foreign_checkpoints(config.checkpoint.path)

    def restore(self, step: int | None) -> LoadResult | None:
        """From the newest checkpoint, or that of a step; none where there is none yet: the run starts anew."""
        assert self._checkpointer is not None
        steps = self._checkpointer.steps()
        if step is None and not steps:
            return None
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"there is no checkpoint of that step (step {step}; there are: {there})")
        loaded = self._checkpointer.load(steps[-1] if step is None else step)
        if step is not None:
            self._checkpointer.set_aside(step)
        return loaded

    def roll_back(self, before_step: int) -> LoadResult:
        """To the newest checkpoint of a step before one; what is later is set aside."""
        assert self._checkpointer is not None
        self._checkpointer.wait()
        steps = [step for step in self._checkpointer.steps() if step < before_step]
        if not steps:
            raise ValueError(f"there is no checkpoint to go back to (of a step before {before_step})")
        loaded = self._checkpointer.load(steps[-1])
        self._checkpointer.set_aside(steps[-1])
        return loaded

    def save_now(self, step: int) -> None:
        """Saves, and waits until the checkpoint exists."""
        assert self._checkpointer is not None
        self._save(self._checkpointer, step)
        self._checkpointer.wait()

    def is_due(self, step: int, *, last: bool) -> bool:
        """One is written after this step."""
        every = self._config.checkpoint.every
        return bool(every) and (step % every == 0 or last)

    def after_step(self, step: int, *, last: bool) -> None:
        """After a step: raises what went wrong in the background, and saves where it is time to."""
        if self._checkpointer is None or not self._config.checkpoint.every:
            return
        self._checkpointer.check()
        self._report()
        if self.is_due(step, last=last):
            self._save(self._checkpointer, step)

    def save_at_stop(self, step: int) -> None:
        """The run stops after this step, before its end: it is saved, also where no save was asked for."""
        if self._checkpointer is None:
            self._checkpointer = self._open_checkpointer()
        if self._last_saved_step != step:
            self._save(self._checkpointer, step)

    def finish(self) -> str | None:
        """Until the last save is through; gives its address."""
        if self._checkpointer is None:
            return None
        self._checkpointer.wait()
        self._report()
        return self._checkpointer.last_address

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _refuse_foreign_checkpoints(self, path: str) -> None:
        """A new run among the checkpoints of another would remove those, or go on from them when it is resumed."""
        assert self._checkpointer is not None
        if steps := self._checkpointer.steps():
            raise ValueError(
                f"checkpoint.path={path} has checkpoints of another run (steps {abbreviate([*map(str, steps)])}); go on with "
                "that run (--resume RUN), or set a path of this run's own"
            )

    def _open_checkpointer(self) -> EngineCheckpointer:
        keep = RetentionPolicy(last=self._config.checkpoint.keep, every=self._config.checkpoint.keep_every)
        return EngineCheckpointer(self._engine, self.address, keep=keep)

    def _save(self, saving: EngineCheckpointer, step: int) -> None:
        begun = time.perf_counter()
        with self._engine.recorder.phase_scope("save"):
            saving.wait()
            self._report()
            saving.save(self._facts(step))
        self._blocked_s, self._last_saved_step = time.perf_counter() - begun, step

    def _report(self) -> None:
        assert self._checkpointer is not None
        if self._checkpointer.last_address is not None and self._checkpointer.last_address != self._logged_address:
            self._logged_address = self._checkpointer.last_address
            facts = {"path": self._logged_address, "hash": self._checkpointer.hash}
            self._log("checkpoint", {**facts, "bytes": self._checkpointer.nbytes, "blocked_s": self._blocked_s})

    def _facts(self, step: int) -> dict[str, Any]:
        config = self._config
        return {
            "seed": config.seed,
            "samples": step * config.batch,
            "layout": str(self._engine.layout),
            "config": config.to_toml(),
            **self._extra_facts(step),
        }
