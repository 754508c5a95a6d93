"""From a global batch to this rank's microbatches, on its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.faults.injector import corrupt_batch
from echelon.parallel.parallel_model import ParallelModel
from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.training.step_result import copy_to_device

Batch = Mapping[str, Tensor]
"""the model's keyword arguments; the first dimension of each is samples"""


@dataclass(frozen=True)
class Microbatch:
    inputs: Batch
    samples: Tensor
    """global sample index of each row"""


class BatchSharder:
    """One rank's part of every batch."""

    def __init__(self, parallel: ParallelModel):
        self._parallel, self._layout, self._recorder = parallel, parallel.layout, parallel.axes.recorder

    def row_ranges(self, batch: int) -> Iterator[range]:
        """This rank's rows of a global batch, microbatch by microbatch."""
        dp, accumulate = self._layout.dp, self._layout.accumulate
        size = batch // (dp * accumulate)
        for index in range(accumulate):
            start = (index * dp + self._parallel.axes.coordinates["dp"]) * size
            yield range(start, start + size)

    def microbatches(self, batch: Batch, num_steps: int) -> Iterator[Microbatch]:
        """Of a global batch that every rank is given alike, after so many steps of as many rows."""
        if not batch:
            raise ValueError("the batch is empty; give the model's keyword arguments as tensors")
        rows = len(next(iter(batch.values())))
        dp, accumulate = self._layout.dp, self._layout.accumulate
        if not rows:
            raise ValueError("the batch has no rows; give at least one for each rank of dp and microbatch")
        if rows % (dp * accumulate):
            raise ValueError(
                f"the batch does not divide over dp x accumulate ({rows} rows over {dp} x {accumulate}); "
                f"use a multiple of {dp * accumulate}"
            )
        for samples in self.row_ranges(rows):
            inputs = {key: value[samples.start : samples.stop] for key, value in batch.items()}
            yield Microbatch(inputs, torch.arange(samples.start, samples.stop) + num_steps * rows)

    def check_count(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        """One by one, as they may be made one by one; raises where there are more or fewer than a step has."""
        given = 0
        coming = iter(microbatches)
        while True:
            with self._recorder.data_loading():
                microbatch = next(coming, None)
            if microbatch is None:
                break
            microbatch = Microbatch(corrupt_batch(microbatch.inputs, microbatch.samples), microbatch.samples)
            given += 1
            if given > self._layout.accumulate:
                break
            yield microbatch
        if given != self._layout.accumulate:
            found = f"{given} given" if given < self._layout.accumulate else "more are given"
            raise ValueError(
                f"a step has accumulate={self._layout.accumulate} microbatches on every rank ({found}); "
                "give so many, or change accumulate in the layout"
            )

    def estimate_num_targets(self, microbatch: Microbatch) -> int:
        """Targets of a step before there was any: from the shapes alone, which all ranks know."""
        rows = len(microbatch.samples) * self._layout.dp * self._layout.accumulate
        whole = [value for value in microbatch.inputs.values() if not value.is_floating_point() and value.dim() == 2]
        return rows * max([value.shape[1] for value in whole], default=1)

    def prepare(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The microbatch on the device, floats in the compute type; dropout is told which samples these are."""
        self._recorder.enter_phase("forward")
        self._parallel.rng_stream.samples = self.sample_indices(microbatch)
        return self._move_to_device(microbatch)

    def pipeline_microbatches(self, microbatches: Iterable[Microbatch]) -> list[MicrobatchInputs]:
        """For a pipeline."""
        cutting, found = self._parallel.cp_context, []
        for microbatch in microbatches:
            inputs = self._move_to_device(microbatch)
            found.append(
                MicrobatchInputs(inputs, self.sample_indices(microbatch), full_length=cutting.seq_len if cutting else 0)
            )
        return found

    def sample_indices(self, microbatch: Microbatch) -> Tensor:
        return copy_to_device(microbatch.samples, self._parallel.options.device)

    def _move_to_device(self, microbatch: Microbatch) -> dict[str, Tensor]:
        options, cutting = self._parallel.options, self._parallel.cp_context
        whole = {
            key: copy_to_device(value, options.device, options.compute_dtype if value.is_floating_point() else None)
            for key, value in microbatch.inputs.items()
        }
        return whole if cutting is None else cutting.shard_inputs(whole)
