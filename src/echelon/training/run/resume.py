"""`train --resume RUN`: the configuration of a resumed run. Imports no torch."""

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
"""directory of checkpoints inside a run's directory"""
FIXED_KEYS = ("model", "data.", "seq_len", "batch", "seed", "tied", "gate")
"""keys that define the parameters and the order of the samples"""
ADAPTER_KEYS = ("lora.rank", "lora.alpha", "lora.rslora", "lora.targets", "lora.train")
"""keys that define which parameters are trained, and what adapters compute"""
STATE_KEYS = ("optimizer.name", "optimizer.states")
"""keys that define the optimizer states"""
GROWING_KEYS = ("data.skip_batches",)
"""keys that may grow by batches of later steps (batch_index.py)"""


def resumed_config(resume: str | Path, settings: Sequence[str], *, world: int | None = None) -> Config:
    """Return the saved configuration of a run (or of a checkpoint's run) with settings over it, such as more steps."""
    run, _ = parse_resume_path(resume)
    old = schema.effective_values(Run.open(run).config)
    # With another optimizer, Config.load would refuse saved settings that the user never gave.
    given = {name: text for name, _, text in (setting.partition("=") for setting in settings)}
    _refuse_changes(old, {name: given[name].strip("\"'") for name in STATE_KEYS if name in given})
    config = Config.load(run / "config.toml", settings, world=world, written_by_run=True, to_train=True)
    new = schema.effective_values(config)
    fixed_keys = (*FIXED_KEYS, *ADAPTER_KEYS)
    fixed = (name for name in {**old, **new} if name.startswith(fixed_keys) and name not in GROWING_KEYS)
    _refuse_changes(old, {name: new.get(name) for name in fixed})
    return config


def _refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ValidationError for keys that a resumed run cannot change; a key without a value is unset."""
    issues, message = [], "cannot change when a run resumes"
    for name, value in new.items():
        if value != old.get(name):
            text, before = (
                schema.format_toml(each) if each is not None else "unset" for each in (value, old.get(name))
            )
            legal = f"{before}, or a new run"
            issues.append(ValidationIssue(key=name, value=text, message=message, legal=legal))
    if issues:
        raise ValidationError(issues)


def parse_resume_path(resume: str | Path) -> tuple[Path, int | None]:
    """Split a path into the run's directory and, if it names a checkpoint, its step."""
    path = Path(resume)
    match = STEP_DIR_PATTERN.fullmatch(path.name)
    if match and path.parent.name == CHECKPOINTS_DIR:
        return path.parent.parent, int(match[1])
    return path, None


def refuse_if_running(run: Run) -> None:
    """Lock the run, or raise RunError: two processes in one directory would mix their logs and delete checkpoints.

    The lock of a machine that has failed may persist on a shared disk. Its log does not grow: no step takes longer than
    the time-out.
    """
    if not run.lock() and run.seconds_since_log < run.config.timeout:
        run.close()
        raise RunError(
            f"another process is training in the run's directory ({run.path}; "
            f"its log grew {run.seconds_since_log:.0f} s ago); wait until it has finished, or end it"
        )


def refuse_if_checkpoints_missing(run: Run, address: str) -> None:
    """Refuse to restart from step 0 a run whose checkpoints have disappeared, for instance with their disk."""
    written = [str(record["path"]) for record in run.records("checkpoint", complete=True)]
    if written:
        raise ValueError(
            f"the run has written checkpoints (the last: {written[-1]}), and none exists now ({address}); mount "
            "their disk, or set their path (--set checkpoint.path=...). To train from the start, start a new run"
        )
