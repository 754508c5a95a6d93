"""Loss spikes: a loss far above its recent history, and the way back from it.

[Note: what a spike is]

    limit = median + factor x max(1.4826 x median |loss - median|, FLOOR x median)        over the last `window` losses

1.4826 x the median deviation is the standard deviation of numbers from a bell curve, and neither it nor the median
moves when one number is wild, as mean and standard deviation do. The floor keeps a run whose losses hardly differ from
calling every ripple a spike. Until there are `window` losses nothing is one.

[Note: the way back]

    1  step 7 is told, and is a spike              all ranks are told the same losses, and decide alike
    2  batch 7 goes on the list of skipped ones
    3  the newest checkpoint of a step before 7 is loaded, here in the running process; later ones are set aside
    4  it is written again, with the list in it    so that a run which is killed now goes on with it
    5  steps go on from there; step 7 has batch 8

Losses up to a checkpoint are a part of it, so a resumed run calls the same losses spikes. No checkpoint is written
before the loss of its last step is known, so none holds an update from a spike.

A step whose gradients are not finite updates nothing, and needs no way back. When so many in a row did that the run
would end (precision.skips), they are treated as one spike: all their batches are skipped.
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
"""of the median: the least deviation that is reckoned with"""
MAD_TO_SIGMA = 1.4826
"""median deviations of a bell curve in its standard deviation"""


@dataclass(frozen=True, kw_only=True)
class Spike:
    first: int
    """the step whose batch it was"""
    last: int
    """the step after which it was known to be one"""
    loss: float
    median: float
    """of the losses before it"""
    limit: float
    """above which a loss is a spike"""
    reason: str = ""
    """where it was no high loss"""

    def record(self) -> dict[str, Any]:
        """For the log."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        return (
            f"loss {self.loss:.3f} of step {self.first} is a spike "
            f"(the losses before it: median {self.median:.3f}, limit {self.limit:.3f})"
        )


class DivergedError(ValueError):
    """Too many steps in a row updated nothing."""

    def __init__(self, text: str, first: int, last: int):
        super().__init__(text)
        self.first, self.last = first, last


def spike_limit(losses: Sequence[float], factor: float) -> tuple[float, float]:
    """(median, limit) of a history."""
    middle = median(losses)
    spread = MAD_TO_SIGMA * median(abs(loss - middle) for loss in losses)
    return middle, middle + factor * max(spread, MIN_RELATIVE_SPREAD * abs(middle))


class SpikeDetector:
    """What a run remembers of its losses."""

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.recent_losses: deque[float] = deque(maxlen=config.window)
        """losses of the last steps that updated something"""
        self.rollbacks = 0

    @property
    def is_enabled(self) -> bool:
        return self.config.action != "none"

    @property
    def rolls_back(self) -> bool:
        return self.config.action == "rollback"

    def observe(self, step: int, result: StepResult) -> Spike | None:
        """A step is through. A loss from which the run goes back is none of its history."""
        if not self.is_enabled or result.skipped:
            return None
        found = None
        if len(self.recent_losses) == self.config.window:
            middle, limit = spike_limit(self.recent_losses, self.config.factor)
            if result.loss > limit:
                found = Spike(first=step, last=step, loss=result.loss, median=middle, limit=limit)
        if found is None or not self.rolls_back:
            self.recent_losses.append(result.loss)
        return found

    def spike_from_divergence(self, error: DivergedError, result: StepResult) -> Spike:
        """Steps with gradients that are not finite, as one spike."""
        middle, limit = (
            spike_limit(self.recent_losses, self.config.factor) if self.recent_losses else (float("nan"), float("nan"))
        )
        return Spike(
            first=error.first, last=error.last, loss=result.loss, median=middle, limit=limit, reason=str(error)
        )

    def count_rollback(self, spike: Spike) -> None:
        """One more way back, if there is one left."""
        if self.rollbacks == self.config.rollbacks:
            raise ValueError(
                f"{spike}; the run has gone back {self.rollbacks} time(s) already (spike.rollbacks), and ends here. "
                "Lower optimizer.lr, set clip, look at the data of the batches that were skipped, or allow more"
            )
        self.rollbacks += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"losses": list(self.recent_losses), "rollbacks": self.rollbacks} if self.is_enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As they were at a checkpoint; ways back since then stay counted."""
        self.recent_losses.clear()
        self.recent_losses.extend(state.get("losses", ()))
        self.rollbacks = max(self.rollbacks, int(state.get("rollbacks", 0)))
