"""Sharding of the global batch: this rank's microbatches, on its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.faults.injector import corrupt_batch
from echelon.parallel.parallel_model import ParallelModel
from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.training.step_result import copy_to_device

Batch = Mapping[str, Tensor]
"""the model's keyword arguments; the first dimension of each is samples"""


def count_rows(batch: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch. Raise ValueError for a batch that cannot be cut into samples."""
    if not batch:
        raise ValueError("the batch is empty; give the model's keyword arguments as tensors")
    others = [f"{key}: {type(value).__name__}" for key, value in batch.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"a batch consists of tensors ({', '.join(others)}); give each tensor a keyword of its own, and settings "
            "to the model when it is built"
        )
    rows = {key: len(value) if value.dim() else 1 for key, value in batch.items()}
    first = next(iter(rows))
    if different := [key for key, value in batch.items() if rows[key] != rows[first] or not value.dim()]:
        shapes = ", ".join(f"{key}: {list(batch[key].shape)}" for key in dict.fromkeys((first, *different)))
        raise ValueError(
            f"tensors of a batch differ in rows ({shapes}); the first dimension of each is samples: repeat what all "
            "samples share, or let the model hold it"
        )
    if not rows[first]:
        raise ValueError("the batch has no rows; give at least one per dp rank and microbatch")
    return rows[first]


@dataclass(frozen=True)
class Microbatch:
    """Inputs of one forward pass of this rank."""

    inputs: Batch
    samples: Tensor
    """global sample index of each row"""


class BatchSharder:
    """Cuts every global batch into one rank's microbatches."""

    def __init__(self, parallel: ParallelModel):
        self._parallel, self._layout, self._recorder = parallel, parallel.layout, parallel.axes.recorder

    def row_ranges(self, batch: int) -> Iterator[range]:
        """Yield this rank's rows of a global batch, microbatch by microbatch."""
        dp, accumulate = self._layout.dp, self._layout.accumulate
        size = batch // (dp * accumulate)
        for index in range(accumulate):
            start = (index * dp + self._parallel.axes.coordinates["dp"]) * size
            yield range(start, start + size)

    def microbatches(self, batch: Batch, num_steps: int) -> Iterator[Microbatch]:
        """Yield this rank's part of a global batch, which is the same on every rank, after `num_steps` such batches."""
        rows = count_rows(batch)
        dp, accumulate = self._layout.dp, self._layout.accumulate
        if rows % (dp * accumulate):
            raise ValueError(
                f"the batch does not divide over dp x accumulate ({rows} rows over {dp} x {accumulate}); "
                f"use a multiple of {dp * accumulate}"
            )
        for samples in self.row_ranges(rows):
            inputs = {key: value[samples.start : samples.stop] for key, value in batch.items()}
            yield Microbatch(inputs, torch.arange(samples.start, samples.stop) + num_steps * rows)

    def check_count(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        """Yield microbatches as they are loaded; raise ValueError unless there are `accumulate` of them."""
        given = 0
        loader = iter(microbatches)
        while True:
            with self._recorder.data_loading():
                microbatch = next(loader, None)
            if microbatch is None:
                break
            microbatch = Microbatch(corrupt_batch(microbatch.inputs, microbatch.samples), microbatch.samples)
            given += 1
            if given > self._layout.accumulate:
                break
            yield microbatch
        if given != self._layout.accumulate:
            received = f"got {given}" if given < self._layout.accumulate else "got more"
            raise ValueError(
                f"expected accumulate={self._layout.accumulate} microbatches per step and rank, {received}; "
                "give as many, or change accumulate in the layout"
            )

    def estimate_num_targets(self, microbatch: Microbatch) -> int:
        """Estimate the targets of the first step from the input shapes, which are equal on all ranks."""
        rows = len(microbatch.samples) * self._layout.dp * self._layout.accumulate
        tokens = [value for value in microbatch.inputs.values() if not value.is_floating_point() and value.dim() == 2]
        return rows * max([value.shape[1] for value in tokens], default=1)

    def prepare(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the microbatch on the device, floats in the compute dtype; dropout learns its sample indices."""
        self._recorder.enter_phase("forward")
        self._parallel.rng_stream.samples = self.sample_indices(microbatch)
        return self._move_to_device(microbatch)

    def pipeline_microbatches(self, microbatches: Iterable[Microbatch]) -> list[MicrobatchInputs]:
        """Move all microbatches of a step to the device, as a pipeline takes them."""
        cp_context, on_device = self._parallel.cp_context, []
        for microbatch in microbatches:
            inputs = self._move_to_device(microbatch)
            full_length = cp_context.seq_len if cp_context else 0
            on_device.append(MicrobatchInputs(inputs, self.sample_indices(microbatch), full_length=full_length))
        return on_device

    def sample_indices(self, microbatch: Microbatch) -> Tensor:
        """Return the global sample indices on the device."""
        return copy_to_device(microbatch.samples, self._parallel.options.device)

    def _move_to_device(self, microbatch: Microbatch) -> dict[str, Tensor]:
        options, cp_context = self._parallel.options, self._parallel.cp_context
        inputs = {
            key: copy_to_device(value, options.device, options.compute_dtype if value.is_floating_point() else None)
            for key, value in microbatch.inputs.items()
        }
        return inputs if cp_context is None else cp_context.shard_inputs(inputs)
