"""Attempts at one run: restarted ranks resume it, with the ranks that exist now.

[Note: which run to resume]

A rank that torch's elastic agent restarts knows only the agent's run id. The run's directory contains that id, in
plan.json and in each `start` record of its log; so a restarted rank resumes the newest run with this id in the
directory where this configuration puts its runs. torchrun names every run "none" without --rdzv-id: then only a restart
resumes, and a process that starts for the first time starts a new run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config.run_config import Config
from echelon.faults.injection_spec import Injection, injections_of_later_attempt
from echelon.launch import scratch_dir
from echelon.launch.rendezvous import AGENT_VARIABLE, Rendezvous, join_rendezvous, under_agent
from echelon.layout import Layout, ValidationError
from echelon.training.elastic.replan import LayoutChange, can_run, plan_layout_change
from echelon.training.run.resume import parse_resume_path
from echelon.training.run.run_dir import Run, RunError, default_run_path

if TYPE_CHECKING:
    from echelon.training.logging.step_logger import StepLogger

UNNAMED_RUN_ID = "none"
"""torchrun's run id without --rdzv-id"""
RESTART, REPLAN = "restart", "replan"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a run, by the ranks that exist now."""

    config: Config
    resume: str = ""
    """the run to resume; empty for a new one"""
    restart_count: int = 0
    """restarts before this attempt"""
    active_ranks: int | None = None
    """number of ranks that train, if the others idle"""
    layout_change: LayoutChange | None = None
    initial_ranks: int | None = None
    """ranks of the first attempt, in a later one"""

    def log_fields(self) -> dict[str, str]:
        """Return the fields of the run's plan and of its `start` record."""
        return {"elastic": os.environ[AGENT_VARIABLE]} if under_agent() else {}

    def injections(self, inject: Sequence[Injection], world: int) -> tuple[Injection, ...]:
        """Return the injected faults of this attempt: after the first, only ranks that are gone for good."""
        if not self.restart_count:
            return tuple(inject)
        return injections_of_later_attempt(inject, world, first_world_size=self.initial_ranks or world)

    def log_changes(self, logger: StepLogger) -> None:
        """Log the restart and the change of layout before this attempt."""
        if self.restart_count and logger.run is not None and scratch_dir.scratch_dir() is None:
            of = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
            logger.log(RESTART, number=self.restart_count, of=of, time=time.time(), **_last_failure(logger.run))
        if self.layout_change is not None:
            logger.display.print_note(str(self.layout_change))
            logger.log(REPLAN, **self.layout_change.record())


def join_attempt(config: Config, resume: str) -> tuple[Attempt, Rendezvous[Attempt] | None]:
    """Return the attempt that rank 0 determines, on all ranks. Without torch's elastic agent there is only one."""
    import torch.distributed as dist

    if not under_agent() or dist.is_initialized():
        return Attempt(config=config, resume=resume), None
    world = int(os.environ["WORLD_SIZE"])
    rendezvous = join_rendezvous(lambda: determine_attempt(config, resume, world), timeout=config.timeout)
    return rendezvous.decision, rendezvous


def determine_attempt(config: Config, resume: str, world: int) -> Attempt:
    """Determine the attempt, on rank 0."""
    number, run_id = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ[AGENT_VARIABLE]
    path = find_run(config, resume, run_id, restarted=number > 0)
    to_resume = resume_target(path, resume, run_id)
    run = Run.open(parse_resume_path(to_resume)[0]) if to_resume else None
    if path is not None and not number:
        number = 1  # agents do not count restarts when machines join or leave
    initial_ranks = Layout.parse(str(run.plan["layout"])).world if run is not None else None
    attempt = Attempt(config=config, resume=to_resume, restart_count=number, initial_ranks=initial_ranks)
    if not config.elastic.replan:
        return attempt
    before = last_layout(run) if run is not None else config.layout
    ranks = Layout.parse(before, world=None if before else world).world
    available = f"{world} rank{'s are' if world > 1 else ' is'}"
    why = f"{available} left" if run is not None and world < ranks else f"{available} available"
    if can_run(config, world):  # the requested layout, perhaps after another one
        layout = config.layout or f"dp={world}"
        change = LayoutChange(old_layout=before, new_layout=layout, step_seconds=None, reason=why)
        # The launcher of this machine logs the change itself.
        is_logged = run is None or ranks == world or scratch_dir.scratch_dir() is not None
        return attempt if is_logged else replace(attempt, layout_change=change)
    planned = plan_layout_change(config, before, world, reason=why)
    if planned is None:
        return attempt  # the layout is refused later, with its issues
    config = replace(config, layout=planned.new_layout)
    logged_change = planned if planned.new_layout != before else None
    return replace(attempt, config=config, active_ranks=planned.used_ranks, layout_change=logged_change)


def find_run(config: Config, resume: str, run_id: str, *, restarted: bool) -> Path | None:
    """Return the directory of the run of an earlier attempt, if any: see the note."""
    if resume:
        given = parse_resume_path(resume)[0]
        return given if restarted or (run_id != UNNAMED_RUN_ID and _is_unfinished_run(given, run_id)) else None
    if not restarted and (run_id == UNNAMED_RUN_ID or scratch_dir.scratch_dir() is not None):
        return None
    wanted = default_run_path(config)
    pattern = f"{wanted.name}*" if config.run else f"{wanted.name.rsplit('-', 2)[0]}-*"
    runs = [path for path in wanted.parent.glob(pattern) if _is_unfinished_run(path, run_id)]
    return max(runs, key=lambda path: (path / "plan.json").stat().st_mtime_ns, default=None)


def resume_target(path: Path | None, resume: str, run_id: str) -> str:
    """Return the run to resume; the requested checkpoint, unless an earlier attempt has progressed beyond it."""
    if path is None:
        return resume
    names_checkpoint = parse_resume_path(resume)[1] is not None
    is_first = names_checkpoint and run_id != UNNAMED_RUN_ID and not _is_unfinished_run(path, run_id)
    return resume if is_first else str(path)


def _is_unfinished_run(path: Path, run_id: str) -> bool:
    with suppress(RunError, ValidationError, OSError, ValueError, TypeError):
        run = Run.open(path)
        ids, ended = {run.plan.get("elastic")}, False
        for record in run.records():
            if record["kind"] == "start":
                ids.add(record.get("elastic"))
            ended = record["kind"] == "end" or (ended and record["kind"] != "start")
        return run_id in ids and not ended
    return False


def last_layout(run: Run) -> str:
    """Return the layout of the previous attempt."""
    return str([run.plan["layout"], *(record["layout"] for record in run.records("resume", complete=True))][-1])


def _last_failure(run: Run) -> dict[str, Any]:
    failure: dict[str, Any] = {}
    for record in run.records(complete=True):
        if record["kind"] == "start":
            failure = {}
        elif record["kind"] == "diagnosis":
            failure = {"ranks": record["ranks"], "text": record["text"]}
        elif record["kind"] == "stopped":
            failure = {"ranks": [], "text": f"stopped by {record['signal']} after step {record['step']}"}
    return failure or {"ranks": [], "text": "no failure report"}
