"""The runtime of TeraPipe: the actions are on slices of a microbatch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from echelon.models.pipeline_model import Chain, Link
from echelon.parallel.apply import Parallel
from echelon.pipeline.execution.runtime import Runtime, Work
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make
from echelon.pipeline.slices.token_slices import Slices, length_of, lengths, sliced


class SliceRuntime(Runtime):
    """The one stage of a rank. The number of slices follows from the length of the sequences."""

    def __init__(
        self,
        parallel: Parallel,
        chain: Chain,
        stages: Sequence[Sequence[Link]],
        schedule: Schedule,
        *,
        given: tuple[int, ...] = (),
    ):
        super().__init__(parallel, chain, stages, schedule)
        self.slices, self.given = Slices(parallel), given
        if not self.slices.pasts or chain.cut is None:
            raise ValueError(
                "schedule=terapipe needs attention that takes a sequence piece by piece (models/attention.py), and "
                "a chain that can cut what is shared (`Chain.cut`); use schedule=1f1b"
            )
        if not getattr(getattr(parallel.model, "config", None), "causal", True):
            raise ValueError(
                "schedule=terapipe begins with a sequence's first tokens, and these see later ones (causal=False); "
                "use schedule=1f1b"
            )

    def parts(self, length: int) -> tuple[int, ...]:
        """The lengths of the slices of a sequence."""
        return lengths(length, self.schedule.stages, self.parallel.model, self.given)

    def scheduled(self, length: int) -> Schedule:
        """The schedule for sequences of a length."""
        count = len(self.parts(length))
        if self.schedule.slices != count:
            made = make("terapipe", self.schedule.ranks, self.schedule.microbatches, slices=count)
            self.schedule = lower(replace(made, note=f"slices of {', '.join(map(str, self.parts(length)))} tokens"))
        return self.schedule

    def train(self, works: Sequence[Work], seed: float | Tensor) -> Tensor:
        length = length_of(works)
        self.scheduled(length)
        found = super().train([part for work in works for part in sliced(work, self.parts(length))], seed)
        self.slices.at = None
        return found

    def _set(self, work: Work, stage: int, m: int) -> None:
        super()._set(work, stage, m)
        self.slices.at = (m // self.schedule.slices, work.part) if work.whole is not None else None
        self.slices.span = work.span

    def _shared(self, work: Work) -> Any:
        if work.whole is None:
            return super()._shared(work)
        assert self.chain.cut is not None
        return self.chain.cut(self.chain.shared(**work.whole), *work.span[:2])

    def _roots(
        self, m: int, outputs: list[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        microbatch, part = divmod(m, self.schedule.slices)
        more = self.slices.roots(microbatch, part)
        return [*outputs, *(tensor for tensor, _ in more)], [*gradients, *(gradient for _, gradient in more)]

    def _close(self, stage: int, m: int, index: int) -> None:
        super()._close(stage, m, index)
        self.slices.drop(*divmod(m, self.schedule.slices))
