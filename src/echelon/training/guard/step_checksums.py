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

from echelon.faults.flight_recorder import here
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.param_group import FlatUnit
from echelon.training.guard.module_outputs import outputs

FAINT = 1e-4
"""of the median of all norms: below it they are compared with this"""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class Event:
    what: str
    """in words"""
    layer: str
    """the module or parameter that it was at"""
    own: bool
    """made here, and not got from another rank"""


class Witness:
    """Of one pass."""

    def __init__(self, *, bits: bool):
        """With `bits`, equal means equal bits."""
        self._bits = bits
        self.events: list[Event] = []
        self._values: list[Tensor] = []
        self._at = ""
        self._backward = False

    @contextmanager
    def of(self, parallel: Parallel) -> Iterator[None]:
        """Everything that is made inside is written down."""
        with ExitStack() as stack:
            stack.enter_context(outputs(parallel.model, self._output, self._enter))
            for unit in parallel.flat.units:
                unit.on_reduce = self._gradients
            here.on_sent, here.on_received = self._sent, self._received
            try:
                yield
            finally:
                here.on_sent = here.on_received = None
                for unit in parallel.flat.units:
                    unit.on_reduce = None

    def see(self, what: str, layer: str, value: Tensor, *, own: bool = True) -> None:
        if not value.is_floating_point():
            return  # the first message of a shape is preceded by its sizes, in one pass only
        self.events.append(Event(what, layer, own))
        self._values.append(sum_of(value) if self._bits else norm_of(value))

    def values(self) -> Tensor:
        """Of all events."""
        dtype = torch.int64 if self._bits else torch.float64
        return torch.stack(self._values) if self._values else torch.zeros(0, dtype=dtype)

    def _enter(self, name: str) -> None:
        self._at, self._backward = name, False

    def _output(self, name: str, value: Tensor) -> None:
        self.see(f"the output of {name}", name, value)

    def _gradients(self, unit: FlatUnit) -> None:
        for entry in unit.unit.entries:
            if entry.trainable:
                self._at, self._backward = entry.name, True
                self.see(f"its own gradient of {entry.name}", entry.name, unit.gradient_of(entry))

    def _sent(self, op: str, axis: str, value: Tensor) -> None:
        self.see(f"what it gave to {op} over {axis}, {self._place}", self._at, value)

    def _received(self, op: str, axis: str, value: Tensor) -> None:
        self.see(f"what it got by {op} over {axis}, {self._place}", self._at, value, own=False)

    @property
    def _place(self) -> str:
        if here.phase == "backward":
            return f"in backward behind {self._at}" if self._backward else "at the beginning of backward"
        return f"in {self._at}" if self._at else "at the beginning"


def sum_of(value: Tensor) -> Tensor:
    """int64: of the bits of a floating-point tensor."""
    return value.detach().contiguous().view(WORDS[value.element_size()]).sum(dtype=torch.int64)


def norm_of(value: Tensor) -> Tensor:
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
        apart = (one_ - other_).abs() > tolerance * torch.maximum(one_.abs(), other_.abs()).clamp(min=FAINT * usual)
        return torch.where(finite, apart, torch.isfinite(one_) != torch.isfinite(other_))
    return one_ != other_


def first_difference(one: Tensor, other: Tensor, tolerance: float) -> int:
    """The place of the first event that differs; -1 where none does."""
    found = differences(one, other, tolerance).nonzero().flatten()
    if len(found):
        return int(found[0])
    return -1 if len(one) == len(other) else max(min(len(one), len(other)) - 1, 0)
