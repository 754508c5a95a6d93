"""A run's checkpoints, as the loop sees them: when one is due, what became of the last, where a resumed run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.checkpoint.checkpoint_index import few
from echelon.checkpoint.load import Loaded
from echelon.checkpoint.save import Keep
from echelon.config.run_config import Config
from echelon.faults.flight_recorder import here
from echelon.training.engine import Engine
from echelon.training.engine_state import Saving
from echelon.training.resume import FOLDER

Tell = Callable[[str, dict[str, Any]], None]
"""takes a kind of record, and what is in it"""


class Checkpoints:
    """Nothing at all where none are written and none is read."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        run: Path | None,
        *,
        resumes: bool,
        tell: Tell,
        more: Callable[[int], Mapping[str, Any]] = lambda step: {},
    ):
        """`run` is the directory, on the first rank; `more` gives facts of a step that a checkpoint is to hold."""
        self._config, self._engine, self._tell, self._more = config, engine, tell, more
        self._saving: Saving | None = None
        self._told: str | None = None
        self._blocked = 0.0
        self._saved = 0
        self.address = config.checkpoint.path or str((run or Path()) / FOLDER)
        if config.checkpoint.every or config.checkpoint.path or resumes:
            self._saving = self._open()
        if config.checkpoint.path and not resumes:
            self._refuse_others(config.checkpoint.path)

    def restore(self, step: int | None) -> Loaded | None:
        """From the newest checkpoint, or that of a step; none where there is none yet: the run starts anew."""
        assert self._saving is not None
        steps = self._saving.steps()
        if step is None and not steps:
            return None
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"there is no checkpoint of that step (step {step}; there are: {there})")
        loaded = self._saving.load(steps[-1] if step is None else step)
        if step is not None:
            self._saving.set_aside(step)
        return loaded

    def back(self, before: int) -> Loaded:
        """To the newest checkpoint of a step before one; what is later is set aside."""
        assert self._saving is not None
        self._saving.wait()
        steps = [step for step in self._saving.steps() if step < before]
        if not steps:
            raise ValueError(f"there is no checkpoint to go back to (of a step before {before})")
        loaded = self._saving.load(steps[-1])
        self._saving.set_aside(steps[-1])
        return loaded

    def now(self, step: int) -> None:
        """Saves, and waits until the checkpoint exists."""
        assert self._saving is not None
        self._save(self._saving, step)
        self._saving.wait()

    def due(self, step: int, *, last: bool) -> bool:
        """One is written after this step."""
        every = self._config.checkpoint.every
        return bool(every) and (step % every == 0 or last)

    def after(self, step: int, *, last: bool) -> None:
        """After a step: raises what went wrong in the background, and saves where it is time to."""
        if self._saving is None or not self._config.checkpoint.every:
            return
        self._saving.check()
        self._report()
        if self.due(step, last=last):
            self._save(self._saving, step)

    def at_stop(self, step: int) -> None:
        """The run stops after this step, before its end: it is saved, also where no save was asked for."""
        if self._saving is None:
            self._saving = self._open()
        if self._saved != step:
            self._save(self._saving, step)

    def end(self) -> str | None:
        """Until the last save is through; gives its address."""
        if self._saving is None:
            return None
        self._saving.wait()
        self._report()
        return self._saving.last

    def close(self) -> None:
        if self._saving is not None:
            self._saving.close()

    def _refuse_others(self, path: str) -> None:
        """A new run among the checkpoints of another would remove those, or go on from them when it is resumed."""
        assert self._saving is not None
        if steps := self._saving.steps():
            raise ValueError(
                f"checkpoint.path={path} has checkpoints of another run (steps {few([*map(str, steps)])}); go on with "
                "that run (--resume RUN), or set a path of this run's own"
            )

    def _open(self) -> Saving:
        keep = Keep(last=self._config.checkpoint.keep, every=self._config.checkpoint.keep_every)
        return Saving(self._engine, self.address, keep=keep)

    def _save(self, saving: Saving, step: int) -> None:
        begun = time.perf_counter()
        with here.during("save"):
            saving.wait()
            self._report()
            saving.save(self._facts(step))
        self._blocked, self._saved = time.perf_counter() - begun, step

    def _report(self) -> None:
        assert self._saving is not None
        if self._saving.last is not None and self._saving.last != self._told:
            self._told = self._saving.last
            facts = {"path": self._told, "hash": self._saving.hash}
            self._tell("checkpoint", {**facts, "bytes": self._saving.nbytes, "blocked_s": self._blocked})

    def _facts(self, step: int) -> dict[str, Any]:
        config = self._config
        return {
            "seed": config.seed,
            "samples": step * config.batch,
            "layout": str(self._engine.layout),
            "config": config.to_toml(),
            **self._more(step),
        }
