"""The runtime of TeraPipe: every action runs on a slice of a microbatch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from echelon.parallel.parallel_model import ParallelModel
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.execution.stage_assignment import StageAssignment
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.slices.token_slices import SliceState, sequence_length, slice_lengths, slice_microbatch


class SliceRuntime(PipelineRuntime):
    """Executes the one stage of a rank. The number of slices follows from the sequence length."""

    def __init__(self, parallel: ParallelModel, assignment: StageAssignment):
        super().__init__(parallel, assignment)
        self.slice_state = SliceState(parallel)
        if not self.slice_state.kv_caches or self.pipeline_model.slice_shared is None:
            raise ValueError(
                "schedule=terapipe requires attention that takes a sequence slice by slice (models/attention.py), and "
                "a chain that can slice its shared inputs (`PipelineModel.slice_shared`); use schedule=1f1b"
            )
        if not getattr(getattr(parallel.model, "config", None), "causal", True):
            raise ValueError(
                "schedule=terapipe starts with the first tokens of a sequence, which see later ones (causal=False); "
                "use schedule=1f1b"
            )

    def slice_lengths(self, seq_len: int) -> tuple[int, ...]:
        return slice_lengths(seq_len, self.schedule.stages, self.parallel.model, self.parallel.options.slice_lengths)

    def schedule_for(self, seq_len: int) -> Schedule:
        lengths = self.slice_lengths(seq_len)
        if self.schedule.slices != len(lengths):
            made = make_schedule("terapipe", self.schedule.ranks, self.schedule.microbatches, slices=len(lengths))
            self.schedule = lower(replace(made, note=f"slices of {', '.join(map(str, lengths))} tokens"))
        return self.schedule

    def train(self, microbatches: Sequence[MicrobatchInputs], grad_seed: float | Tensor) -> Tensor:
        seq_len = sequence_length(microbatches)
        self.schedule_for(seq_len)
        lengths = self.slice_lengths(seq_len)
        slices = [part for microbatch in microbatches for part in slice_microbatch(microbatch, lengths)]
        totals = super().train(slices, grad_seed)
        self.slice_state.current = None
        return totals

    def _set_microbatch(self, microbatch: MicrobatchInputs, stage: int, m: int) -> None:
        super()._set_microbatch(microbatch, stage, m)
        is_slice = microbatch.full_inputs is not None
        self.slice_state.current = (m // self.schedule.slices, microbatch.slice_index) if is_slice else None
        self.slice_state.span = microbatch.span

    def _shared(self, microbatch: MicrobatchInputs) -> Any:
        if microbatch.full_inputs is None:
            return super()._shared(microbatch)
        assert self.pipeline_model.slice_shared is not None
        shared = self.pipeline_model.shared(**microbatch.full_inputs)
        return self.pipeline_model.slice_shared(shared, *microbatch.span[:2])

    def _backward_roots(
        self, m: int, outputs: list[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Backward of a slice also starts from its keys and values, which later slices have used."""
        microbatch, slice_index = divmod(m, self.schedule.slices)
        more = self.slice_state.kv_gradients(microbatch, slice_index)
        return [*outputs, *(tensor for tensor, _ in more)], [*gradients, *(gradient for _, gradient in more)]

    def _end_backward(self, stage: int, m: int, index: int) -> None:
        super()._end_backward(stage, m, index)
        self.slice_state.release(*divmod(m, self.schedule.slices))
