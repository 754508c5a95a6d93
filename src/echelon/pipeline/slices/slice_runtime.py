"""The runtime of TeraPipe: the actions are on slices of a microbatch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.parallel.apply import ParallelModel
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.slices.token_slices import SliceState, sequence_length, slice_lengths, slice_microbatch


class SliceRuntime(PipelineRuntime):
    """The one stage of a rank. The number of slices follows from the length of the sequences."""

    def __init__(
        self,
        parallel: ParallelModel,
        pipeline_model: PipelineModel,
        stage_layers: Sequence[Sequence[PipelineLayer]],
        schedule: Schedule,
        *,
        fixed_lengths: tuple[int, ...] = (),
    ):
        super().__init__(parallel, pipeline_model, stage_layers, schedule)
        self.slice_state, self.fixed_lengths = SliceState(parallel), fixed_lengths
        if not self.slice_state.kv_caches or pipeline_model.slice_shared is None:
            raise ValueError(
                "schedule=terapipe needs attention that takes a sequence piece by piece (models/attention.py), and "
                "a chain that can cut what is shared (`Chain.cut`); use schedule=1f1b"
            )
        if not getattr(getattr(parallel.model, "config", None), "causal", True):
            raise ValueError(
                "schedule=terapipe begins with a sequence's first tokens, and these see later ones (causal=False); "
                "use schedule=1f1b"
            )

    def slice_lengths(self, length: int) -> tuple[int, ...]:
        """The lengths of the slices of a sequence."""
        return slice_lengths(length, self.schedule.stages, self.parallel.model, self.fixed_lengths)

    def schedule_for(self, length: int) -> Schedule:
        """The schedule for sequences of a length."""
        count = len(self.slice_lengths(length))
        if self.schedule.slices != count:
            made = make_schedule("terapipe", self.schedule.ranks, self.schedule.microbatches, slices=count)
            self.schedule = lower(
                replace(made, note=f"slices of {', '.join(map(str, self.slice_lengths(length)))} tokens")
            )
        return self.schedule

    def train(self, microbatches: Sequence[MicrobatchInputs], grad_seed: float | Tensor) -> Tensor:
        length = sequence_length(microbatches)
        self.schedule_for(length)
        found = super().train(
            [part for work in microbatches for part in slice_microbatch(work, self.slice_lengths(length))], grad_seed
        )
        self.slice_state.current = None
        return found

    def _set_microbatch(self, microbatch: MicrobatchInputs, stage: int, m: int) -> None:
        super()._set_microbatch(microbatch, stage, m)
        self.slice_state.current = (
            (m // self.schedule.slices, microbatch.slice_index) if microbatch.full_inputs is not None else None
        )
        self.slice_state.span = microbatch.span

    def _shared(self, microbatch: MicrobatchInputs) -> Any:
        if microbatch.full_inputs is None:
            return super()._shared(microbatch)
        assert self.pipeline_model.slice_shared is not None
        return self.pipeline_model.slice_shared(
            self.pipeline_model.shared(**microbatch.full_inputs), *microbatch.span[:2]
        )

    def _backward_roots(
        self, m: int, outputs: list[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        microbatch, part = divmod(m, self.schedule.slices)
        more = self.slice_state.kv_gradients(microbatch, part)
        return [*outputs, *(tensor for tensor, _ in more)], [*gradients, *(gradient for _, gradient in more)]

    def _end_backward(self, stage: int, m: int, index: int) -> None:
        super()._end_backward(stage, m, index)
        self.slice_state.release(*divmod(m, self.schedule.slices))
