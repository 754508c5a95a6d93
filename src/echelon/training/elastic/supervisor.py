"""Supervisor of ranks on this machine: restarts them after a failure, without a rank that fails every time."""

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
    """Start ranks until an attempt completes the run, or no restart and no other layout is left."""
    forkserver.forkserver_context([train_on_rank.__module__])  # imported once, not by every rank of every attempt
    remaining = [*range(procs)]
    launch = _LaunchAttempt(config, resume, procs, devices=())
    while True:
        try:
            return launch.run(quiet, inject)
        except KeyboardInterrupt:
            launch.print_resume_hint("interrupted")
            raise
        except RankError as error:
            change = launch.layout_without_failed_rank(error, remaining, config)
            if change is None:
                if not error.is_refusal:
                    launch.print_resume_hint("the run has ended")
                raise
            remaining.pop(error.rank)
            inject = injections_of_later_attempt(inject, change.used_ranks, first_world_size=procs)
            resume = resume_target(launch.path, resume, launch.run_id)
            new_config, used = replace(config, layout=change.new_layout), change.used_ranks
            launch = _LaunchAttempt(new_config, resume, used, devices=remaining[:used])


class _LaunchAttempt:
    """One launch of the ranks, in one layout, with its restarts."""

    def __init__(self, config: Config, resume: str, procs: int, *, devices: Sequence[int]):
        self.config, self.resume, self.procs, self.devices = config, resume, procs, devices
        self.run_id = uuid.uuid4().hex
        self.failed_ranks: list[int] = []

    @property
    def path(self) -> Path | None:
        """Directory of the run, once it exists."""
        return find_run(self.config, self.resume, self.run_id, restarted=True)

    def print_resume_hint(self, why: str) -> None:
        """Print how to resume, before the error."""
        path = self.path if self.config.checkpoint.every else None
        if path is not None and next(Run.open(path).records("checkpoint"), None) is not None:
            _print_notice(f"{why}; resume from its newest checkpoint with: echelon train --resume {path}")

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
            # Not by the restarted ranks, which may fail before they log it.
            append_event(path, {"number": number, "of": of, "ranks": [error.rank], "text": str(error)}, RESTART)

    def layout_without_failed_rank(
        self, error: RankError, remaining_ranks: Sequence[int], requested_config: Config
    ) -> LayoutChange | None:
        """Return a change to a layout without the failed rank, if the same rank failed every time; else None.

        `remaining_ranks` are numbered as in the first attempt, like their GPUs.
        """
        others_failed = {*self.failed_ranks} - {error.rank}
        if not requested_config.elastic.replan or error.is_refusal or others_failed or len(remaining_ranks) == 1:
            return None
        path, times = self.path, len(self.failed_ranks) + 1
        before = last_layout(Run.open(path)) if path is not None else self.config.layout or f"dp={self.procs}"
        others = [number for number in remaining_ranks if number != remaining_ranks[error.rank]]
        often = f"{times} times in a row" if times > 1 else "with no restart left"
        why = f"rank {remaining_ranks[error.rank]} failed {often}"
        change = plan_layout_change(requested_config, before, len(others), reason=why, rank_numbers=others)
        if change is not None:
            _print_notice(f"{_first_sentence(error)} The run continues without that rank: {change}.")
            if path is not None:
                append_event(path, change.record(), REPLAN)
        return change


def _first_sentence(error: RankError) -> str:
    """Return the first sentence of the error; the log has all of it."""
    return str(error).splitlines()[0].partition(". ")[0].rstrip(".") + "."


def _print_notice(text: str) -> None:
    print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
