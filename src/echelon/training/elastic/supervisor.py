"""A run on ranks of this machine: restarts where one fails, and fewer ranks where one is broken for good."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.config.run_config import Config
from echelon.faults.failure_report import append_event
from echelon.faults.injection_spec import Injection, injections_of_later_attempt
from echelon.launch import forkserver
from echelon.launch.rank_failure import RankError
from echelon.training.elastic.attempts import REPLAN, RESTART, find_run, last_layout, resume_target
from echelon.training.elastic.replan import LayoutChange, plan_layout_change
from echelon.training.logging.step_logger import RunSummary
from echelon.training.loop import train_on_rank
from echelon.training.run.run_dir import Run


def supervise(config: Config, *, quiet: bool, inject: Sequence[Injection], resume: str, procs: int) -> RunSummary:
    """Starts ranks until an attempt comes to its end, or nothing is left to try."""
    forkserver.forkserver_context([train_on_rank.__module__])  # imported once, and not by every rank of every attempt
    left = [*range(procs)]
    this = _LaunchAttempt(config, resume, procs, devices=())
    while True:
        try:
            return this.run(quiet, inject)
        except KeyboardInterrupt:
            this.print_resume_hint("interrupted")
            raise
        except RankError as error:
            change = this.layout_without_failed_rank(error, left, config)
            if change is None:
                this.print_resume_hint("the run has ended")
                raise
            left.pop(error.rank)
            inject = injections_of_later_attempt(inject, change.used_ranks, first_world_size=procs)
            resume = resume_target(this.path, resume, this.run_id)
            this = _LaunchAttempt(
                replace(config, layout=change.new_layout), resume, change.used_ranks, devices=left[: change.used_ranks]
            )


class _LaunchAttempt:
    """Of so many ranks, in one layout."""

    def __init__(self, config: Config, resume: str, procs: int, *, devices: Sequence[int]):
        self.config, self.resume, self.procs, self.devices = config, resume, procs, devices
        self.run_id = uuid.uuid4().hex
        self.failed_ranks: list[int] = []

    @property
    def path(self) -> Path | None:
        """Of the run, as soon as it has one."""
        return find_run(self.config, self.resume, self.run_id, restarted=True)

    def print_resume_hint(self, why: str) -> None:
        """Before the error, which comes last."""
        path = self.path if self.config.checkpoint.every else None
        if path is not None and next(Run.open(path).records("checkpoint"), None) is not None:
            _print_notice(f"{why}; go on from its newest checkpoint with: echelon train --resume {path}")

    def run(self, quiet: bool, inject: Sequence[Injection]) -> RunSummary:
        from echelon.faults.post_mortem import explain_failure
        from echelon.launch.local_launcher import launch_ranks

        return launch_ranks(
            train_on_rank,
            (self.config, quiet, tuple(inject), self.resume),
            self.procs,
            explain=explain_failure,
            max_restarts=self.config.elastic.restarts,
            on_restart=self._on_restart,
            is_stoppable=True,
            run_id=self.run_id,
            devices=self.devices,
        )

    def _on_restart(self, error: RankError, number: int) -> None:
        self.failed_ranks.append(error.rank)
        of = self.config.elastic.restarts
        _print_notice(f"{_first_sentence(error)} Restart {number} of {of}.")
        if (path := self.path) is not None:
            # Here, and not by the ranks that are restarted: those may fail before they come to it.
            append_event(path, {"number": number, "of": of, "ranks": [error.rank], "text": str(error)}, RESTART)

    def layout_without_failed_rank(
        self, error: RankError, remaining_ranks: Sequence[int], requested_config: Config
    ) -> LayoutChange | None:
        """Where the same rank failed every time: to a layout without it, of those that are left; none if not so.

        `left` are ranks by the numbers that they had first, which are those of their GPUs.
        """
        is_refused = error.failure is not None and bool(error.failure.user_errors)
        if (
            not requested_config.elastic.replan
            or is_refused
            or {*self.failed_ranks} - {error.rank}
            or len(remaining_ranks) == 1
        ):
            return None
        path, times = self.path, len(self.failed_ranks) + 1
        before = last_layout(Run.open(path)) if path is not None else self.config.layout or f"dp={self.procs}"
        others = [number for number in remaining_ranks if number != remaining_ranks[error.rank]]
        often = f"{times} times in a row" if times > 1 else "with no restart left"
        why = f"rank {remaining_ranks[error.rank]} failed {often}"
        change = plan_layout_change(requested_config, before, len(others), reason=why, rank_numbers=others)
        if change is not None:
            _print_notice(f"{_first_sentence(error)} The run goes on without that rank: {change}.")
            if path is not None:
                append_event(path, change.record(), REPLAN)
        return change


def _first_sentence(error: RankError) -> str:
    """The first sentence of what is known. The log has all of it."""
    return str(error).splitlines()[0].partition(". ")[0].rstrip(".") + "."


def _print_notice(text: str) -> None:
    print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
