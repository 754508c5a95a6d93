"""A run on ranks of this machine: restarts where one fails, and fewer ranks where one is broken for good."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace

from echelon.faults.injection import Injection, later
from echelon.faults.log import write
from echelon.launch.failure import RankError
from echelon.train.config import Config
from echelon.train.elastic import RESTART, last_layout, run_of
from echelon.train.loop import train_here
from echelon.train.replan import Change, change_of
from echelon.train.run import Run
from echelon.train.summary import Summary

REPLAN = "replan"


def launched(
    config: Config, *, quiet: bool, inject: Sequence[Injection], resume: str, procs: int
) -> Summary:
    """Starts ranks until one attempt comes to its end, or nothing is left to try."""
    from echelon.faults.autopsy import explain
    from echelon.launch.local import start

    ranks = list(range(procs))
    """by the numbers that they had first: those of their GPUs"""
    used, asked = procs, config
    while True:
        blamed: list[int] = []
        run_id = uuid.uuid4().hex

        def on_restart(error: RankError, number: int) -> None:
            blamed.append(error.rank)
            _say(f"{_short(error)} Restart {number} of {config.elastic.restarts}.")
            if (path := run_of(config, resume, run_id, restarted=True)) is not None:
                # Here, and not by the ranks that are restarted: those may fail before they come to it.
                facts = {"number": number, "of": config.elastic.restarts, "ranks": [error.rank], "text": str(error)}
                write(path, facts, RESTART)

        try:
            return start(
                train_here,
                (config, quiet, tuple(inject), resume),
                used,
                explain=explain,
                restarts=config.elastic.restarts,
                on_restart=on_restart,
                stoppable=True,
                run_id=run_id,
                devices=ranks[:used] if len(ranks) < procs else (),
            )
        except RankError as error:
            refused = error.failure is not None and bool(error.failure.refused)
            path = run_of(config, resume, run_id, restarted=True)
            change = None
            if config.elastic.replan and {*blamed} <= {error.rank} and not refused and len(ranks) > 1:
                gone = ranks.pop(error.rank)
                before = last_layout(Run.open(path)) if path is not None else config.layout or f"dp={used}"
                change = _change(asked, before, gone, ranks, failures=len(blamed) + 1)
            if change is None:
                raise
            _say(f"{_short(error)} The run goes on without that rank: {change}.")
            if path is not None:
                write(path, change.record(), REPLAN)
            config, used, resume = replace(asked, layout=change.after), change.ranks, str(path or resume)
            inject = later(inject, used)


def _change(config: Config, before: str, gone: int, ranks: Sequence[int], *, failures: int) -> Change | None:
    times = f"{failures} times in a row" if failures > 1 else "once, with no restart left"
    return change_of(config, before, len(ranks), why=f"rank {gone} failed {times}", numbers=ranks)


def _short(error: RankError) -> str:
    """The first sentence of what is known. The log has all of it."""
    return str(error).splitlines()[0].partition(". ")[0].rstrip(".") + "."


def _say(text: str) -> None:
    print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
