"""What a run came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run came to; the keys of `train --json`."""

    run: str
    """its directory"""
    steps: int
    loss: float
    tokens_per_s: float
    mfu: float
    hfu: float
    goodput: float
    """share of the time since start-up that went into training steps that were kept"""
    eval_loss: float | None
    time: dict[str, float]
    """what goodput is made of (faults/goodput.py)"""
    checkpoint: str | None = None
    """the last checkpoint"""
    experts: dict[str, Any] | None = None
    """how evenly experts were used in the last step, and `dropped_in_run`; none where the model has no experts"""

    stopped: int | None = None
    """the step after which it stopped because it was asked to (SIGTERM); none where it came to its end"""

    def log_fields(self) -> dict[str, Any]:
        """For the log and `--json`: of experts only where there are some, of a stop only where there was one."""
        rare = ("experts", "stopped")
        return {name: value for name, value in asdict(self).items() if name not in rare or value is not None}
