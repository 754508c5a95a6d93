"""Which batch each step trains on: step s has the s-th batch that is not skipped.

    batches    1  2  3  4  5  6  7 ...        batch 4 is skipped
    steps      1  2  3     4  5  6 ...

The order of the data stays a pure function of the seed, and what a run has to remember is one short list. Learning rate
and dropout are functions of the step, so a run that goes back and skips a batch is the run that never saw it.
"""

from __future__ import annotations

from collections.abc import Iterable


class BatchIndex:
    def __init__(self, skipped: Iterable[int] = ()):
        self.skipped = tuple(sorted(set(skipped)))
        """their numbers, counted from 1 as steps are"""

    def batch_of_step(self, step: int) -> int:
        """The number of a step's batch; both count from 1."""
        number = step
        for skipped in self.skipped:
            number += skipped <= number
        return number

    def skip(self, batch_numbers: Iterable[int]) -> None:
        self.skipped = tuple(sorted({*self.skipped, *batch_numbers}))

    def restore(self, skipped_before: Iterable[int], completed_steps: int) -> None:
        """A run goes on after so many steps, which a checkpoint says skipped these; more may be asked for by now."""
        before = BatchIndex(skipped_before)
        seen = before.batch_of_step(completed_steps) if completed_steps else 0
        late = [number for number in self.skipped if number <= seen and number not in before.skipped]
        if late:
            raise ValueError(
                f"a batch that was trained on cannot be skipped (data.skip_batches: {', '.join(map(str, late))}; after "
                f"step {completed_steps} the next batch is {before.batch_of_step(completed_steps + 1)}); go on from an earlier checkpoint"
            )
        self.skip(before.skipped)
