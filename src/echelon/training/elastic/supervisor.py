"""A run on ranks of this machine: restarts where one fails, and fewer ranks where one is broken for good."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.config.run_config import Config
from echelon.faults.event_log import write
from echelon.faults.injection_spec import Injection, later
from echelon.launch import forkserver
from echelon.launch.rank_failure import RankError
from echelon.training.elastic.attempts import REPLAN, RESTART, goes_on_with, last_layout, run_of
from echelon.training.elastic.replan import Change, change_of
from echelon.training.logging.run_summary import Summary
from echelon.training.loop import train_here
from echelon.training.run_dir import Run


def launched(config: Config, *, quiet: bool, inject: Sequence[Injection], resume: str, procs: int) -> Summary:
    """Starts ranks until an attempt comes to its end, or nothing is left to try."""
    forkserver.context([train_here.__module__])  # imported once, and not by every rank of every attempt
    left = [*range(procs)]
    this = _Launch(config, resume, procs, devices=())
    while True:
        try:
            return this.run(quiet, inject)
        except KeyboardInterrupt:
            this.say_how_to_go_on("interrupted")
            raise
        except RankError as error:
            change = this.change(error, left, config)
            if change is None:
                this.say_how_to_go_on("the run has ended")
                raise
            left.pop(error.rank)
            inject = later(inject, change.ranks, began=procs)
            resume = goes_on_with(this.path, resume, this.run_id)
            this = _Launch(replace(config, layout=change.after), resume, change.ranks, devices=left[: change.ranks])


class _Launch:
    """Of so many ranks, in one layout."""

    def __init__(self, config: Config, resume: str, procs: int, *, devices: Sequence[int]):
        self.config, self.resume, self.procs, self.devices = config, resume, procs, devices
        self.run_id = uuid.uuid4().hex
        self.blamed: list[int] = []

    @property
    def path(self) -> Path | None:
        """Of the run, as soon as it has one."""
        return run_of(self.config, self.resume, self.run_id, restarted=True)

    def say_how_to_go_on(self, why: str) -> None:
        """Before the error, which comes last."""
        path = self.path if self.config.checkpoint.every else None
        if path is not None and next(Run.open(path).records("checkpoint"), None) is not None:
            _say(f"{why}; go on from its newest checkpoint with: echelon train --resume {path}")

    def run(self, quiet: bool, inject: Sequence[Injection]) -> Summary:
        from echelon.faults.post_mortem import explain
        from echelon.launch.local_launcher import start

        return start(
            train_here,
            (self.config, quiet, tuple(inject), self.resume),
            self.procs,
            explain=explain,
            restarts=self.config.elastic.restarts,
            on_restart=self._restarts,
            stoppable=True,
            run_id=self.run_id,
            devices=self.devices,
        )

    def _restarts(self, error: RankError, number: int) -> None:
        self.blamed.append(error.rank)
        of = self.config.elastic.restarts
        _say(f"{_short(error)} Restart {number} of {of}.")
        if (path := self.path) is not None:
            # Here, and not by the ranks that are restarted: those may fail before they come to it.
            write(path, {"number": number, "of": of, "ranks": [error.rank], "text": str(error)}, RESTART)

    def change(self, error: RankError, left: Sequence[int], asked: Config) -> Change | None:
        """Where the same rank failed every time: to a layout without it, of those that are left; none if not so.

        `left` are ranks by the numbers that they had first, which are those of their GPUs.
        """
        is_refused = error.failure is not None and bool(error.failure.refused)
        if not asked.elastic.replan or is_refused or {*self.blamed} - {error.rank} or len(left) == 1:
            return None
        path, times = self.path, len(self.blamed) + 1
        before = last_layout(Run.open(path)) if path is not None else self.config.layout or f"dp={self.procs}"
        others = [number for number in left if number != left[error.rank]]
        often = f"{times} times in a row" if times > 1 else "with no restart left"
        why = f"rank {left[error.rank]} failed {often}"
        change = change_of(asked, before, len(others), why=why, numbers=others)
        if change is not None:
            _say(f"{_short(error)} The run goes on without that rank: {change}.")
            if path is not None:
                write(path, change.record(), REPLAN)
        return change


def _short(error: RankError) -> str:
    """The first sentence of what is known. The log has all of it."""
    return str(error).splitlines()[0].partition(". ")[0].rstrip(".") + "."


def _say(text: str) -> None:
    print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
