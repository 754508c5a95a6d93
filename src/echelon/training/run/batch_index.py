"""Which batch each step trains on: step s has the s-th batch that is not skipped.

    batches    1  2  3  4  5  6  7 ...        batch 4 is skipped
    steps      1  2  3     4  5  6 ...

The order of the data stays a pure function of the seed, and a run saves only one short list. Learning rate and dropout
are functions of the step, so a run that rolls back and skips a batch equals the run that never saw it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class BatchIndex:
    """Maps steps to batches; both count from 1."""

    def __init__(self, skipped: Iterable[int] = ()):
        self.skipped = tuple(sorted(set(skipped)))
        """numbers of the skipped batches, sorted"""

    def batch_of_step(self, step: int) -> int:
        number = step
        for skipped in self.skipped:
            number += skipped <= number
        return number

    def skip(self, batch_numbers: Iterable[int]) -> None:
        self.skipped = tuple(sorted({*self.skipped, *batch_numbers}))

    def restore(self, skipped_before: Collection[int], completed_steps: int) -> None:
        """Resume after `completed_steps`, which skipped `skipped_before`; the configuration may skip more by now."""
        if not all(type(number) is int and number > 0 for number in skipped_before):
            raise ValueError(f"the checkpoint's skipped batches are no numbers >= 1 ({str(list(skipped_before))[:40]})")
        saved = BatchIndex(skipped_before)
        seen = saved.batch_of_step(completed_steps) if completed_steps else 0
        late = [number for number in self.skipped if number <= seen and number not in saved.skipped]
        if late:
            raise ValueError(
                f"a batch that was trained on cannot be skipped (data.skip_batches: {', '.join(map(str, late))}; "
                f"after step {completed_steps} the next batch is {saved.batch_of_step(completed_steps + 1)}); "
                "resume from an earlier checkpoint"
            )
        self.skip(saved.skipped)
