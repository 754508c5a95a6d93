"""`train --resume RUN`: the configuration of a run that goes on. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.checkpoint.storage import STEP_DIR_PATTERN
from echelon.config import schema
from echelon.config.run_config import Config
from echelon.layout import ValidationError, ValidationIssue
from echelon.training.run.run_dir import Run, RunError

CHECKPOINTS_DIR = "checkpoints"
"""in a run's directory"""
FIXED_KEYS = ("model", "data.", "seq_len", "batch", "seed", "tied", "gate")
"""keys that say which numbers the state is, and which samples come next"""
STATE_KEYS = ("optimizer.name", "optimizer.states")
"""keys that say which states there are"""
GROWING_KEYS = ("data.skip_batches",)
"""may grow by batches that are yet to come (batches.py)"""


def resumed_config(run: Path, settings: Sequence[str], *, world: int | None = None) -> Config:
    """As the run has it, with settings over it: another layout, more steps."""
    old = schema.effective_values(Run.open(run).config)
    # With other states, settings of the run's own would be refused first, which nobody has given.
    given = {name: text for name, _, text in (setting.partition("=") for setting in settings)}
    _refuse_changes(old, {name: given[name].strip("\"'") for name in STATE_KEYS if name in given})
    config = Config.load(run / "config.toml", settings, world=world, written_by_run=True)
    new = schema.effective_values(config)
    _refuse_changes(old, {name: new[name] for name in old if name.startswith(FIXED_KEYS) and name not in GROWING_KEYS})
    return config


def _refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """What cannot be other than it was."""
    faults = [
        ValidationIssue(
            key=name,
            value=schema.format_toml(value),
            message="cannot change while a run goes on",
            legal=f"{schema.format_toml(old[name])}, or a new run",
        )
        for name, value in new.items()
        if value != old[name]
    ]
    if faults:
        raise ValidationError(faults)


def parse_resume_path(resume: str | Path) -> tuple[Path, int | None]:
    """A run's directory, and a step where one of its checkpoints is named."""
    path = Path(resume)
    match = STEP_DIR_PATTERN.fullmatch(path.name)
    if match and path.parent.name == CHECKPOINTS_DIR:
        return path.parent.parent, int(match[1])
    return path, None


def refuse_if_running(run: Run) -> None:
    """Two processes that train in one directory would mix their logs, and remove each other's checkpoints.

    The claim of a machine that is gone may last on a disk that others share. Its log does not grow: no step takes
    longer than the time-out.
    """
    if not run.lock() and run.seconds_since_log < run.config.timeout:
        run.close()
        raise RunError(
            f"another process is training in the run's directory ({run.path}; its log grew {run.seconds_since_log:.0f} s ago); "
            "wait until it is through, or end it"
        )


def refuse_if_checkpoints_missing(run: Run, address: str) -> None:
    """A run that has written checkpoints must not start anew because their disk is not there."""
    written = [str(record["path"]) for record in run.records("checkpoint")]
    if written:
        raise ValueError(
            f"the run has written checkpoints (the last: {written[-1]}), and none is there now ({address}); mount "
            "their disk, or say where they are (--set checkpoint.path=...). To train from the start, start a new run"
        )
