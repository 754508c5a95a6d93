"""Attempts at one run: who starts again goes on, with the ranks that there are.

[Note: which run it was]

A rank process that torch's elastic agent started anew knows the agent's run id and no more. The run's directory has
that id, in plan.json and in each `start` of its log; so the run that goes on is the newest one with this id, in the
place where this configuration puts its runs. torchrun calls every run "none" unless it is told an id (--rdzv-id): then
only a restart goes on, and a process that starts for the first time starts a new run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.config.run_config import Config
from echelon.faults.injection_spec import Injection, later
from echelon.launch import scratch_dir
from echelon.launch.rendezvous import AGENT, Meeting, meet, under_agent
from echelon.layout import FaultError, Layout
from echelon.training.elastic.replan import Change, change_of, suits
from echelon.training.logging.display import Display
from echelon.training.resume import where
from echelon.training.run_dir import Run, RunError, wanted_path

UNNAMED = "none"
"""the id of torchrun's runs that were given none"""
RESTART, REPLAN = "restart", "replan"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """At a run, by the ranks that there are."""

    config: Config
    resume: str = ""
    """the run that goes on; empty for a new one"""
    number: int = 0
    """of restarts before it"""
    ranks: int | None = None
    """the first so many train, where others idle"""
    change: Change | None = None
    began: int | None = None
    """ranks of the first attempt, where this is a later one"""

    def facts(self) -> dict[str, str]:
        """For a run's plan, and each of its starts."""
        return {"elastic": os.environ[AGENT]} if under_agent() else {}

    def strikes(self, inject: Sequence[Injection], world: int) -> tuple[Injection, ...]:
        """Faults on purpose are for the first attempt; only who is gone stays gone."""
        return later(inject, world, began=self.began or world) if self.number else tuple(inject)

    def tell(self, run: Run | None, display: Display) -> None:
        """What happened between the last attempt and this one."""
        if self.number and run is not None and scratch_dir.folder() is None:
            of = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
            run.log(RESTART, number=self.number, of=of, time=time.time(), **_last_word(run))
        if self.change is not None:
            display.note(str(self.change))
            if run is not None:
                run.log(REPLAN, **self.change.record())


def met(config: Config, resume: str) -> tuple[Attempt, Meeting[Attempt] | None]:
    """What this attempt is, as the first rank found; all ranks ask. Without torch's agent: the first and only one."""
    import torch.distributed as dist

    if not under_agent() or dist.is_initialized():
        return Attempt(config=config, resume=resume), None
    world = int(os.environ["WORLD_SIZE"])
    meeting = meet(lambda: attempt_of(config, resume, world), timeout=config.timeout)
    return meeting.told, meeting


def attempt_of(config: Config, resume: str, world: int) -> Attempt:
    """On the first rank."""
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    path = run_of(config, resume, os.environ[AGENT], restarted=number > 0)
    goes_on = goes_on_with(path, resume, os.environ[AGENT])
    run = Run.open(where(goes_on)[0]) if goes_on else None
    if path is not None and not number:
        number = 1  # agents count for themselves, and not where machines come and go
    began = Layout.parse(str(run.plan["layout"])).world if run is not None else None
    found = Attempt(config=config, resume=goes_on, number=number, began=began)
    if not config.elastic.replan:
        return found
    before = last_layout(run) if run is not None else config.layout
    ranks = Layout.parse(before, world=None if before else world).world
    there = f"{world} rank{'s are' if world > 1 else ' is'}"
    why = f"{there} left" if run is not None and world < ranks else f"{there} there"
    if suits(config, world):  # in the layout that was asked for, perhaps again
        again = Change(before=before, after=config.layout or f"dp={world}", left=world, seconds=None, why=why)
        is_told = (
            run is None or ranks == world or scratch_dir.folder() is not None
        )  # the launcher of this machine told it
        return found if is_told else replace(found, change=again)
    change = change_of(config, before, world, why=why)
    if change is None:
        return found  # refused, with what is wrong
    config = replace(config, layout=change.after)
    return replace(found, config=config, ranks=change.ranks, change=change if change.after != before else None)


def run_of(config: Config, resume: str, run_id: str, *, restarted: bool) -> Path | None:
    """The directory of the run that an attempt before this one began or went on with. See the note."""
    if resume:
        given = where(resume)[0]
        return given if restarted or (run_id != UNNAMED and _is_of(given, run_id)) else None
    if not restarted and (run_id == UNNAMED or scratch_dir.folder() is not None):
        return None
    wanted = wanted_path(config)
    pattern = f"{wanted.name}*" if config.run else f"{wanted.name.rsplit('-', 2)[0]}-*"
    found = [path for path in wanted.parent.glob(pattern) if _is_of(path, run_id)]
    return max(found, key=lambda path: (path / "plan.json").stat().st_mtime_ns, default=None)


def goes_on_with(path: Path | None, resume: str, run_id: str) -> str:
    """A run, or the checkpoint that was asked for: nobody went on from that where no attempt has come so far."""
    if path is None or (where(resume)[1] is not None and run_id != UNNAMED and not _is_of(path, run_id)):
        return resume
    return str(path)


def _is_of(path: Path, run_id: str) -> bool:
    """It has this id, and is not through."""
    with suppress(RunError, FaultError, OSError, ValueError):
        run = Run.open(path)
        ids, ended = {run.plan.get("elastic")}, False
        for record in run.records():
            if record["kind"] == "start":
                ids.add(record.get("elastic"))
            ended = record["kind"] == "end" or (ended and record["kind"] != "start")
        return run_id in ids and not ended
    return False


def last_layout(run: Run) -> str:
    """Of the attempt before."""
    layout = str(run.plan["layout"])
    for record in run.records("resume"):
        layout = str(record["layout"])
    return layout


def _last_word(run: Run) -> dict[str, Any]:
    """What was said of the failure, since the last attempt began."""
    found: dict[str, Any] = {}
    for record in run.records():
        if record["kind"] == "start":
            found = {}
        elif record["kind"] == "diagnosis":
            found = {"ranks": record["ranks"], "text": record["text"]}
        elif record["kind"] == "stopped":
            found = {"ranks": [], "text": f"stopped by {record['signal']} after step {record['step']}"}
    return found or {"ranks": [], "text": "nobody said why"}
