"""What one rank made in one pass of a step, as check sums in the order in which it was made.

[Note: who began]

When a rank computes something wrong, soon all ranks have something wrong: by the first sum over ranks, or by the next
stage. So what a rank got from others is written down too, and told apart from its own:

    rank 0   output of blocks.0   own into all_reduce   [got from all_reduce *]   output of blocks.1 *
    rank 1   output of blocks.0 * own into all_reduce * [got from all_reduce *]   output of blocks.1 *

The first difference (*) of rank 1 is its own: it began. That of rank 0 is something that it got: it was told. No clock
is needed, and it holds for tensor parallelism, for stages of a pipeline and for sums of gradients alike.

A check sum is the sum of a tensor's bits as integers, which no order of adding changes. Where kernels add up in any
order and bits are not repeated, a norm stands in its place. A norm far below all others (the gradient of the bias of
keys, which is 0) is made of rounding, and is held to what the others are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel
from echelon.training.guard.module_outputs import watch_outputs

NEGLIGIBLE_NORM = 1e-4
"""of the median of all norms: below it they are compared with this"""
INT_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class ChecksumEvent:
    what: str
    """in words"""
    layer: str
    """the module or parameter that it was at"""
    is_local: bool
    """made here, and not got from another rank"""


class StepChecksums:
    """Of one pass."""

    def __init__(self, *, bits: bool):
        """With `bits`, equal means equal bits."""
        self._bits = bits
        self.events: list[ChecksumEvent] = []
        self._values: list[Tensor] = []
        self._current_name = ""
        self._backward = False

    @contextmanager
    def recording(self, parallel: ParallelModel) -> Iterator[None]:
        """Everything that is made inside is written down."""
        with ExitStack() as stack:
            stack.enter_context(watch_outputs(parallel.model, self._output, self._enter))
            for unit in parallel.sharded_model.param_groups:
                unit.reduction.before_reduce = self._gradients
            recorder = self._recorder = parallel.axes.recorder
            recorder.on_send, recorder.on_receive = self._sent, self._received
            try:
                yield
            finally:
                recorder.on_send = recorder.on_receive = None
                for unit in parallel.sharded_model.param_groups:
                    unit.reduction.before_reduce = None

    def add(self, what: str, layer: str, value: Tensor, *, is_local: bool = True) -> None:
        if not value.is_floating_point():
            return  # the first message of a shape is preceded by its sizes, in one pass only
        self.events.append(ChecksumEvent(what, layer, is_local))
        self._values.append(bit_checksum(value) if self._bits else float64_norm(value))

    def values(self) -> Tensor:
        """Of all events."""
        dtype = torch.int64 if self._bits else torch.float64
        return torch.stack(self._values) if self._values else torch.zeros(0, dtype=dtype)

    def _enter(self, name: str) -> None:
        self._current_name, self._backward = name, False

    def _output(self, name: str, value: Tensor) -> None:
        self.add(f"the output of {name}", name, value)

    def _gradients(self, unit: ParamGroup) -> None:
        for entry in unit.spec.params:
            if entry.trainable:
                self._current_name, self._backward = entry.name, True
                self.add(f"its own gradient of {entry.name}", entry.name, unit.grads.view(entry))

    def _sent(self, op: str, axis: str, value: Tensor) -> None:
        self.add(f"what it gave to {op} over {axis}, {self._location}", self._current_name, value)

    def _received(self, op: str, axis: str, value: Tensor) -> None:
        self.add(f"what it got by {op} over {axis}, {self._location}", self._current_name, value, is_local=False)

    @property
    def _location(self) -> str:
        if self._recorder.phase == "backward":
            return f"in backward behind {self._current_name}" if self._backward else "at the beginning of backward"
        return f"in {self._current_name}" if self._current_name else "at the beginning"


def bit_checksum(value: Tensor) -> Tensor:
    """int64: of the bits of a floating-point tensor."""
    return value.detach().contiguous().view(INT_DTYPES[value.element_size()]).sum(dtype=torch.int64)


def float64_norm(value: Tensor) -> Tensor:
    """float64: of a tensor, in any of the orders in which it may be added up."""
    found: Tensor = torch.linalg.vector_norm(value.detach().flatten(), dtype=torch.float64)
    return found


def differences(one: Tensor, other: Tensor, tolerance: float) -> Tensor:
    """Which events differ, of those that both have."""
    many = min(len(one), len(other))
    one_, other_ = one[:many], other[:many]
    if tolerance:
        finite = torch.isfinite(one_) & torch.isfinite(other_)
        usual = torch.where(finite, one_.abs(), 0.0).median() if many else 0.0
        apart = (one_ - other_).abs() > tolerance * torch.maximum(one_.abs(), other_.abs()).clamp(
            min=NEGLIGIBLE_NORM * usual
        )
        return torch.where(finite, apart, torch.isfinite(one_) != torch.isfinite(other_))
    return one_ != other_


def first_difference(one: Tensor, other: Tensor, tolerance: float) -> int:
    """The place of the first event that differs; -1 where none does."""
    found = differences(one, other, tolerance).nonzero().flatten()
    if len(found):
        return int(found[0])
    return -1 if len(one) == len(other) else max(min(len(one), len(other)) - 1, 0)
