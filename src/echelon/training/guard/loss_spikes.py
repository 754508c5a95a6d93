"""Loss spikes: a loss far above its recent history, and rollback from it.

[Note: what a spike is]

    limit = median + factor x max(1.4826 x median |loss - median|, FLOOR x median)        over the last `window` losses

1.4826 x the median absolute deviation estimates the standard deviation of a normal distribution, and one outlier moves
neither it nor the median. The floor (MIN_RELATIVE_SPREAD) keeps tiny ripples of a flat loss from counting as spikes.
Until `window` losses are known, no loss is a spike.

[Note: rollback]

    1  step 7 is logged, and is a spike            all ranks read the same losses, and decide alike
    2  batch 7 joins the skipped batches
    3  the newest checkpoint before step 7 is loaded, in the running process; later ones are set aside
    4  it is saved again, with the skipped batches so that a run that is killed now resumes with them
    5  training continues from there; step 7 has batch 8

A checkpoint contains the recent losses, so a resumed run detects the same spikes. No checkpoint is written before the
loss of its last step is known, so none contains an update from a spike.

A step with gradients that are not finite updates nothing, and needs no rollback. When `precision.skips` of them would
end the run, they count as one spike: all their batches are skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from echelon.config.sections import SpikeConfig
from echelon.training.step_result import StepResult

MIN_RELATIVE_SPREAD = 0.02
"""lower bound of the spread, as a fraction of the median"""
MAD_TO_SIGMA = 1.4826
"""standard deviation of a normal distribution, in median absolute deviations"""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A loss spike, or steps that diverged."""

    first: int
    """the step with the first batch to skip"""
    last: int
    """the last step of the spike"""
    loss: float
    median: float
    """median of the losses before it"""
    limit: float
    """largest loss that is no spike"""
    reason: str = ""
    """why it counts as a spike, if not for a high loss"""

    def record(self) -> dict[str, Any]:
        """Return the fields of the log record."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    def __str__(self) -> str:
        history = f"the losses before it: median {self.median:.3f}, limit {self.limit:.3f}"
        return self.reason or f"loss {self.loss:.3f} of step {self.first} is a spike ({history})"


class DivergedError(ValueError):
    """Too many consecutive steps updated nothing."""

    def __init__(self, text: str, first: int, last: int):
        super().__init__(text)
        self.first, self.last = first, last


def spike_limit(losses: Sequence[float], factor: float) -> tuple[float, float]:
    """Return (median, limit) of recent losses."""
    middle = median(losses)
    spread = MAD_TO_SIGMA * median(abs(loss - middle) for loss in losses)
    return middle, middle + factor * max(spread, MIN_RELATIVE_SPREAD * abs(middle))


class SpikeDetector:
    """Detects spikes among the recent losses of a run."""

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.recent_losses: deque[float] = deque(maxlen=config.window)
        """losses of the last steps that were not skipped"""
        self.rollbacks = 0

    @property
    def is_enabled(self) -> bool:
        return self.config.action != "none"

    @property
    def rolls_back(self) -> bool:
        return self.config.action == "rollback"

    def observe(self, step: int, result: StepResult) -> Spike | None:
        """Add the loss of a step, and return it if it is a spike. A loss that is rolled back is not added."""
        if not self.is_enabled or result.skipped:
            return None
        spike = None
        if len(self.recent_losses) == self.config.window:
            middle, limit = spike_limit(self.recent_losses, self.config.factor)
            if result.loss > limit:
                spike = Spike(first=step, last=step, loss=result.loss, median=middle, limit=limit)
        if spike is None or not self.rolls_back:
            self.recent_losses.append(result.loss)
        return spike

    def spike_from_divergence(self, error: DivergedError, result: StepResult) -> Spike:
        """Treat steps with gradients that are not finite as one spike."""
        middle, limit = spike_limit(self.recent_losses or [float("nan")], self.config.factor)
        first, last, reason = error.first, error.last, str(error)
        return Spike(first=first, last=last, loss=result.loss, median=middle, limit=limit, reason=reason)

    def count_rollback(self, spike: Spike) -> None:
        """Count a rollback; raise ValueError if none is left."""
        if self.rollbacks == self.config.rollbacks:
            raise ValueError(
                f"{spike}; the run has rolled back {self.rollbacks} time(s) already (spike.rollbacks), and ends here. "
                "Lower optimizer.lr, set clip, inspect the skipped batches, or allow more rollbacks"
            )
        self.rollbacks += 1

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.recent_losses), "rollbacks": self.rollbacks} if self.is_enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; rollbacks since then stay counted."""
        losses, rollbacks = state.get("losses", []), state.get("rollbacks", 0)
        is_valid = isinstance(losses, list) and all(isinstance(loss, int | float) for loss in losses)
        if not is_valid or not isinstance(rollbacks, int):
            raise ValueError(f"the checkpoint's losses before a spike are no numbers ({str(state)[:80]})")
        self.recent_losses.clear()
        self.recent_losses.extend(losses)
        self.rollbacks = max(self.rollbacks, rollbacks)
