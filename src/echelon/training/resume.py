"""`train --resume RUN`: the configuration of a run that goes on. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.checkpoint.storage import NAME
from echelon.config import schema
from echelon.config.run_config import Config
from echelon.layout import Fault, FaultError
from echelon.training.run_dir import Run, RunError

FOLDER = "checkpoints"
"""in a run's directory"""
FIXED = ("model", "data.", "seq_len", "batch", "seed", "tied", "gate")
"""keys that say which numbers the state is, and which samples come next"""
STATES = ("optimizer.name", "optimizer.states")
"""keys that say which states there are"""
FREE = ("data.skip_batches",)
"""may grow by batches that are yet to come (batches.py)"""


def config_of(run: Path, settings: Sequence[str], *, world: int | None = None) -> Config:
    """As the run has it, with settings over it: another layout, more steps."""
    old = schema.values_of(Run.open(run).config)
    # With other states, settings of the run's own would be refused first, which nobody has given.
    given = {name: text for name, _, text in (setting.partition("=") for setting in settings)}
    _refuse(old, {name: given[name].strip("\"'") for name in STATES if name in given})
    config = Config.load(run / "config.toml", settings, world=world, by_run=True)
    new = schema.values_of(config)
    _refuse(old, {name: new[name] for name in old if name.startswith(FIXED) and name not in FREE})
    return config


def _refuse(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """What cannot be other than it was."""
    faults = [
        Fault(
            key=name,
            value=schema.show(value),
            rule="cannot change while a run goes on",
            legal=f"{schema.show(old[name])}, or a new run",
        )
        for name, value in new.items()
        if value != old[name]
    ]
    if faults:
        raise FaultError(faults)


def where(resume: str | Path) -> tuple[Path, int | None]:
    """A run's directory, and a step where one of its checkpoints is named."""
    path = Path(resume)
    match = NAME.fullmatch(path.name)
    if match and path.parent.name == FOLDER:
        return path.parent.parent, int(match[1])
    return path, None


def refuse_running(run: Run) -> None:
    """Two processes that train in one directory would mix their logs, and remove each other's checkpoints.

    The claim of a machine that is gone may last on a disk that others share. Its log does not grow: no step takes
    longer than the time-out.
    """
    if not run.claim() and run.age < run.config.timeout:
        run.close()
        raise RunError(
            f"another process is training in the run's directory ({run.path}; its log grew {run.age:.0f} s ago); "
            "wait until it is through, or end it"
        )


def refuse_lost(run: Run, address: str) -> None:
    """A run that has written checkpoints must not start anew because their disk is not there."""
    written = [str(record["path"]) for record in run.records("checkpoint")]
    if written:
        raise ValueError(
            f"the run has written checkpoints (the last: {written[-1]}), and none is there now ({address}); mount "
            "their disk, or say where they are (--set checkpoint.path=...). To train from the start, start a new run"
        )
