"""Checksums of everything one rank computes or receives in one pass of a step, in order.

[Note: which rank began]

An error on one rank spreads to all of them, by the first all-reduce or the next stage. So values received from other
ranks are recorded too, and distinguished from local ones:

    rank 0   output of blocks.0   sent to all_reduce     [received by all_reduce *]   output of blocks.1 *
    rank 1   output of blocks.0 * sent to all_reduce *   [received by all_reduce *]   output of blocks.1 *

The first difference (*) of rank 1 is local: the error began there. That of rank 0 is a received value. This needs no
clock, and works for tensor parallelism, pipeline stages and gradient reductions alike.

A checksum is the sum of a tensor's bits as integers, which is independent of the order of addition. Where kernels are
not deterministic, a norm takes its place. A norm far below all others (the gradient of the bias of keys, which is 0) is
rounding error, and is compared on the scale of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel
from echelon.training.guard.module_outputs import watch_outputs

NEGLIGIBLE_NORM = 1e-4
"""fraction of the median norm below which norms are compared with that fraction"""
INT_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class ChecksumEvent:
    """One recorded value."""

    what: str
    """description for the report"""
    layer: str
    """the module or parameter it belongs to"""
    is_local: bool
    """computed on this rank, not received from another"""


class StepChecksums:
    """Records the checksums of one pass."""

    def __init__(self, *, bits: bool):
        """With `bits`, checksums of bits; otherwise norms."""
        self._bits = bits
        self.events: list[ChecksumEvent] = []
        self._values: list[Tensor] = []
        self._current_name = ""
        self._backward = False

    @contextmanager
    def recording(self, parallel: ParallelModel) -> Iterator[None]:
        """Record module outputs, gradients, and what is sent and received, within the context."""
        recorder = self._recorder = parallel.axes.recorder
        with watch_outputs(parallel.model, self._output, self._enter):
            for group in parallel.sharded_model.param_groups:
                group.reduction.before_reduce = self._gradients
            recorder.on_send, recorder.on_receive = self._sent, self._received
            try:
                yield
            finally:
                recorder.on_send = recorder.on_receive = None
                for group in parallel.sharded_model.param_groups:
                    group.reduction.before_reduce = None

    def add(self, what: str, layer: str, value: Tensor, *, is_local: bool = True) -> None:
        if not value.is_floating_point():
            return  # p2p transfers send the sizes of a new shape first, in one pass only
        self.events.append(ChecksumEvent(what, layer, is_local))
        self._values.append(bit_checksum(value) if self._bits else float64_norm(value))

    def values(self) -> Tensor:
        """Return the checksums or norms of all events."""
        dtype = torch.int64 if self._bits else torch.float64
        return torch.stack(self._values) if self._values else torch.zeros(0, dtype=dtype)

    def _enter(self, name: str) -> None:
        self._current_name, self._backward = name, False

    def _output(self, name: str, value: Tensor) -> None:
        self.add(f"the output of {name}", name, value)

    def _gradients(self, group: ParamGroup) -> None:
        for param in group.spec.params:
            if param.trainable:
                self._current_name, self._backward = param.name, True
                self.add(f"its own gradient of {param.name}", param.name, group.grads.view(param))

    def _sent(self, op: str, axis: str, value: Tensor) -> None:
        self.add(f"what it sent to {op} over {axis}, {self._location}", self._current_name, value)

    def _received(self, op: str, axis: str, value: Tensor) -> None:
        self.add(f"what it received by {op} over {axis}, {self._location}", self._current_name, value, is_local=False)

    @property
    def _location(self) -> str:
        if self._recorder.phase == "backward":
            return f"in backward behind {self._current_name}" if self._backward else "at the beginning of backward"
        return f"in {self._current_name}" if self._current_name else "at the beginning"


def bit_checksum(value: Tensor) -> Tensor:
    """int64: sum of the bits of a floating-point tensor, as integers."""
    return value.detach().contiguous().view(INT_DTYPES[value.element_size()]).sum(dtype=torch.int64)


def float64_norm(value: Tensor) -> Tensor:
    """float64: norm of a tensor."""
    norm: Tensor = torch.linalg.vector_norm(value.detach().flatten(), dtype=torch.float64)
    return norm


def differences(one: Tensor, other: Tensor, tolerance: float) -> Tensor:
    """Return which events differ, among those that both passes have."""
    common = min(len(one), len(other))
    one, other = one[:common], other[:common]
    if not tolerance:
        return one != other
    finite = torch.isfinite(one) & torch.isfinite(other)
    usual = torch.where(finite, one.abs(), 0.0).median() if common else 0.0
    scale = torch.maximum(one.abs(), other.abs()).clamp(min=NEGLIGIBLE_NORM * usual)
    apart = (one - other).abs() > tolerance * scale
    return torch.where(finite, apart, torch.isfinite(one) != torch.isfinite(other))


def first_difference(one: Tensor, other: Tensor, tolerance: float) -> int:
    """Return the index of the first event that differs; -1 if none does."""
    indices = differences(one, other, tolerance).nonzero().flatten()
    if len(indices):
        return int(indices[0])
    return -1 if len(one) == len(other) else max(min(len(one), len(other)) - 1, 0)
