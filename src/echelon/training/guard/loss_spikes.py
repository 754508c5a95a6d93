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

FLOOR = 0.02
"""of the median: the least deviation that is reckoned with"""
TO_SIGMA = 1.4826
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


class Diverged(ValueError):
    """Too many steps in a row updated nothing."""

    def __init__(self, text: str, first: int, last: int):
        super().__init__(text)
        self.first, self.last = first, last


def limit_of(losses: Sequence[float], factor: float) -> tuple[float, float]:
    """(median, limit) of a history."""
    middle = median(losses)
    spread = TO_SIGMA * median(abs(loss - middle) for loss in losses)
    return middle, middle + factor * max(spread, FLOOR * abs(middle))


class Spikes:
    """What a run remembers of its losses."""

    def __init__(self, asked: SpikeConfig):
        self.asked = asked
        self.recent: deque[float] = deque(maxlen=asked.window)
        """losses of the last steps that updated something"""
        self.rollbacks = 0

    @property
    def looks(self) -> bool:
        return self.asked.action != "none"

    @property
    def goes_back(self) -> bool:
        return self.asked.action == "rollback"

    def see(self, step: int, result: StepResult) -> Spike | None:
        """A step is through. A loss from which the run goes back is none of its history."""
        if not self.looks or result.skipped:
            return None
        found = None
        if len(self.recent) == self.asked.window:
            middle, limit = limit_of(self.recent, self.asked.factor)
            if result.loss > limit:
                found = Spike(first=step, last=step, loss=result.loss, median=middle, limit=limit)
        if found is None or not self.goes_back:
            self.recent.append(result.loss)
        return found

    def of(self, error: Diverged, result: StepResult) -> Spike:
        """Steps with gradients that are not finite, as one spike."""
        middle, limit = limit_of(self.recent, self.asked.factor) if self.recent else (float("nan"), float("nan"))
        return Spike(
            first=error.first, last=error.last, loss=result.loss, median=middle, limit=limit, reason=str(error)
        )

    def count(self, spike: Spike) -> None:
        """One more way back, if there is one left."""
        if self.rollbacks == self.asked.rollbacks:
            raise ValueError(
                f"{spike}; the run has gone back {self.rollbacks} time(s) already (spike.rollbacks), and ends here. "
                "Lower optimizer.lr, set clip, look at the data of the batches that were skipped, or allow more"
            )
        self.rollbacks += 1

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"losses": list(self.recent), "rollbacks": self.rollbacks} if self.looks else {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """As they were at a checkpoint; ways back since then stay counted."""
        self.recent.clear()
        self.recent.extend(facts.get("losses", ()))
        self.rollbacks = max(self.rollbacks, int(facts.get("rollbacks", 0)))
