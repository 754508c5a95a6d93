"""One runtime for every schedule: it does what the list says, in the order of the list.

[Note: what travels]

    stage s, microbatch m     F: inputs -> outputs         the outputs go to stage s + 1, cut off from the graph
                              B: d outputs -> d inputs     the inputs' gradients go to stage s - 1

A message between two ranks is a send and a receive in the lists. Between two stages of one rank there is nothing to
send: the next stage finds the tensors where the first put them. Nothing here is global: a runtime is its arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.faults.flight_recorder import here
from echelon.models.lm_head import loss_pair
from echelon.models.pipeline_model import Chain, Link
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.sharded_model import explained
from echelon.pipeline.actions import Action, Kind
from echelon.pipeline.execution import split_backward
from echelon.pipeline.execution.fsdp_hooks import Units
from echelon.pipeline.execution.p2p import Arriving, Form, Pipes
from echelon.pipeline.execution.stage_io import Alias, put_together, taken_apart
from echelon.pipeline.schedule import Schedule

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Work:
    """One microbatch's inputs, on the device."""

    inputs: Mapping[str, Tensor]
    samples: Tensor
    whole: Mapping[str, Tensor] | None = None
    """of a slice: the inputs of the whole sequence"""
    part: int = 0
    """of a slice: its number"""
    span: tuple[int, int, int] = (0, 0, 0)
    """of a slice: its start and stop, and the length of the sequence"""
    length: int = 0
    """under context parallelism: the tokens of the whole sequence"""

    @property
    def kind(self) -> Hashable:
        """What the shapes of everything that is made of it depend on."""
        shapes = tuple((key, tuple(value.shape)) for key, value in sorted(self.inputs.items()))
        return shapes, torch.is_grad_enabled()


@dataclass
class Passed:
    """What a stage keeps of a microbatch between forward and backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    later: list[split_backward.Product] = field(default_factory=list)
    """products of weight gradients that were put off"""


class Runtime:
    """The stages of one rank."""

    def __init__(self, parallel: Parallel, chain: Chain, stages: Sequence[Sequence[Link]], schedule: Schedule):
        self.parallel, self.chain, self.stages, self.schedule = parallel, chain, stages, schedule
        axis = parallel.axes["pp"]
        self.rank = axis.index
        self.mine = schedule.of(self.rank)
        self._splits = any(action.kind is Kind.INPUT for action in schedule.lists[self.rank])
        self.units = Units(parallel.flat)
        self.pipes = Pipes(axis, parallel.options.device, 2 * schedule.stages + schedule.ranks)
        self.spans: list[tuple[str, float, float]] | None = None
        """(action, start, end) of the actions of a step that is recorded; a recorded step waits for the device"""
        self._begun = 0.0
        self._slices = 1
        """of a microbatch, in the schedule that is being run: evaluation does not slice"""
        self._works: Mapping[int, Work] = {}
        self._passed: dict[tuple[int, int], Passed] = {}
        self._given: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._asked: dict[tuple[int, int, int], tuple[int, Arriving]] = {}
        self._forms: dict[tuple[int, int], Form] = {}
        self._last_backward: dict[int, int] = {}
        self.seed: float | Tensor = 1.0
        """what backward starts from; as a tensor it is not known to the host"""
        self._end: Callable[..., Tensor] | None = None
        """what runs instead of the last link"""
        self._logits: Tensor | None = None
        self.totals = torch.zeros(2, dtype=torch.float64, device=parallel.options.device)

    # -- one step -----------------------------------------------------------------------------------------------------

    def train(self, works: Sequence[Work], seed: float | Tensor) -> Tensor:
        """Every action of the schedule but the updates: those of a step need the norm over all stages, so whoever holds
        the optimizer makes them together at the end. (sum of losses, number of targets) of this rank.
        """
        self._works, self.seed, self._slices = dict(enumerate(works)), seed, self.schedule.slices
        self.totals.zero_()
        self.units.begin_step()
        actions = self.schedule.lists[self.rank]
        ends = (Kind.BACKWARD, Kind.WEIGHT)
        self._last_backward = {action.stage: index for index, action in enumerate(actions) if action.kind in ends}
        for index, action in enumerate(actions):
            self._do(action, index)
        self.pipes.flush()
        self.units.finish()
        return self.totals

    @torch.no_grad()
    def evaluate(self, works: Sequence[Work], schedule: Schedule) -> Tensor:
        """The totals of forwards alone."""
        self.totals.zero_()
        self._forwards(works, schedule)
        return self.totals

    @torch.no_grad()
    def logits(self, work: Work, schedule: Schedule) -> Tensor | None:
        """What the model says of one batch, on the rank of the last stage."""
        if self.chain.logits is None:
            raise ValueError(
                "the model's chain gives no logits; set `Chain.logits`, or write no text (sample.tokens=0)"
            )
        self._logits = None
        self._end = self.chain.logits
        try:
            self._forwards([work], schedule)
        finally:
            self._end = None
        return self._logits

    def _forwards(self, works: Sequence[Work], schedule: Schedule) -> None:
        self._works, self._slices = dict(enumerate(works)), schedule.slices
        for index, action in enumerate(schedule.lists[self.rank]):
            self._do(action, index)
        self._sent()
        self._passed.clear()
        self._forms.clear()
        for unit in self.parallel.flat.units:
            unit.free()

    def _sent(self) -> None:
        """After an evaluation: its messages are out."""
        self.pipes.flush()

    def _do(self, action: Action, index: int) -> None:
        self._begun = time.time()  # not perf_counter: ranks may be on several machines
        with explained():
            self._act(action, index)
        if self.spans is not None:
            if self.parallel.options.device.type == "cuda":
                torch.cuda.synchronize()
            # A clock may be set back. Then actions seem to take no time, for as long as it was.
            begun = max([self._begun, *(end for _, _, end in self.spans[-1:])])
            self.spans.append((str(action), begun, max(begun, time.time())))

    def _act(self, action: Action, index: int) -> None:
        kind, stage, m = action.kind, action.stage, action.index * self._slices + action.part
        if kind is Kind.FORWARD:
            self._forward(stage, m)
        elif kind in (Kind.BACKWARD, Kind.INPUT):
            self._backward(stage, m)
            if kind is Kind.BACKWARD:
                self._weights(stage, m)
                self._close(stage, m, index)
            else:
                self.units.free_layers(self.mine.index(stage))
        elif kind is Kind.WEIGHT:
            self._weights(stage, m)
            self._close(stage, m, index)
        elif kind is Kind.SEND_FORWARD:
            self._send(stage, m, FORWARD)
        elif kind is Kind.SEND_BACKWARD:
            self._send(stage, m, BACKWARD)
        elif kind is Kind.RECEIVE_FORWARD:
            self._ask(stage, m, FORWARD)
        elif kind is Kind.RECEIVE_BACKWARD:
            self._ask(stage, m, BACKWARD)

    # -- compute ------------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        here.enter("forward")
        work = self._works[m]
        inputs = self._take(stage, m, FORWARD) if stage else ()
        self._set(work, stage, m)
        self.units.ready(self.mine.index(stage))
        passed = Passed(inputs, ())
        with self._halved(passed), self.parallel.saving():
            carried: Any = self._given_to(stage, m, inputs) if stage else None
            shared = self._shared(work)
            last = stage == self.schedule.stages - 1
            for link in self.stages[stage][:-1] if last and self._end else self.stages[stage]:
                carried = link.run(carried, shared, **work.inputs)
        if last and self._end:
            self._logits = self._end(carried, shared, **work.inputs)
        elif last:
            total, count = loss_pair(carried)
            self._note(total.detach(), count)
            passed.outputs = (total,)
        else:
            holder, passed.outputs = taken_apart(carried, link.name)
            self._give(stage + 1, m, FORWARD, tuple(_cut(tensor) for tensor in passed.outputs), holder)
        self._passed[stage, m] = passed

    def _note(self, total: Tensor, count: Tensor) -> None:
        """A microbatch's loss is known."""
        self.totals[0] += total
        self.totals[1] += count

    def _backward(self, stage: int, m: int) -> None:
        here.enter("backward")
        passed = self._passed[stage, m]
        self._set(self._works[m], stage, m)
        part = self.mine.index(stage)
        self.units.ready(part)
        self.units.begin_backward(part)
        outputs = [tensor for tensor in passed.outputs if tensor.requires_grad]
        if stage == self.schedule.stages - 1:
            gradients: Sequence[Tensor] = [_like(tensor, self.seed) for tensor in outputs]
        else:
            gradients = self._take(stage, m, BACKWARD)
        outputs, gradients = self._roots(m, outputs, gradients)
        if outputs:
            with self._halved(passed):
                split_backward.backward(outputs, gradients)
        wanted = [tensor for tensor in passed.inputs if tensor.requires_grad]
        if stage:
            made = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in wanted)
            self._give(stage - 1, m, BACKWARD, made)
        passed.inputs = passed.outputs = ()

    def _weights(self, stage: int, m: int) -> None:
        """The second half of backward: what was put off."""
        self._set(self._works[m], stage, m)
        ready = partial(self.units.gather_layers, self.mine.index(stage))
        split_backward.run(self._passed[stage, m].later, self.parallel.flat.deliver, ready)

    def _given_to(self, stage: int, m: int, inputs: Sequence[Tensor]) -> Any:
        """What the stage's first link is given: what the link before it gave."""
        return put_together(self._forms[stage, m].holder, [Alias.apply(tensor) for tensor in inputs])

    def _shared(self, work: Work) -> Any:
        return self.chain.shared(**work.inputs)

    def _roots(
        self, m: int, outputs: list[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """What backward starts from."""
        return outputs, gradients

    def _close(self, stage: int, m: int, index: int) -> None:
        self._forget(stage, m)
        self.units.end_backward(self.mine.index(stage), last=self._last_backward[stage] == index)

    def _forget(self, stage: int, m: int) -> None:
        """After its backward nothing of a microbatch is needed."""
        del self._passed[stage, m]
        self._forms.pop((stage, m), None)

    def _halved(self, passed: Passed) -> AbstractContextManager[object]:
        return split_backward.Deferred(passed.later) if self._splits else nullcontext()

    def _set(self, work: Work, stage: int, m: int) -> None:
        """Dropout, sequence and context parallelism are told which microbatch this is."""
        self.parallel.stream.samples = work.samples
        if self.parallel.context is not None:
            self.parallel.context.length = work.length
        form = self._forms.get((stage, m))
        if self.parallel.boundary is not None and form is not None:
            self.parallel.boundary.length = form.length

    # -- handing on ---------------------------------------------------------------------------------------------------

    def _give(self, stage: int, m: int, direction: int, tensors: tuple[Tensor, ...], holder: type = tuple) -> None:
        """Puts down what another stage needs: it is there at once for one of this rank, others are sent it."""
        self._given[stage, m, direction] = tensors
        if direction == FORWARD:
            self._forms[stage, m] = self._form(tensors, holder)

    def _form(self, tensors: tuple[Tensor, ...], holder: type = tuple) -> Form:
        return Form(
            tuple(tuple(t.shape) for t in tensors),
            tuple(t.dtype for t in tensors),
            tuple(t.requires_grad for t in tensors),
            self.parallel.boundary.length if self.parallel.boundary is not None else 0,
            holder,
        )

    def _send(self, stage: int, m: int, direction: int) -> None:
        to = stage + 1 if direction == FORWARD else stage - 1
        tensors = self._given.pop((to, m, direction))
        form = self._forms.pop((to, m)) if direction == FORWARD else self._form(tensors)
        self.pipes.send(2 * stage + direction, self.schedule.homes[to], self._works[m].kind, tensors, form)

    def _ask(self, stage: int, m: int, direction: int) -> None:
        sender = stage - 1 if direction == FORWARD else stage + 1
        channel = 2 * sender + direction
        arriving = self.pipes.receive(channel, self.schedule.homes[sender], self._works[m].kind)
        self._asked[stage, m, direction] = (channel, arriving)

    def _take(self, stage: int, m: int, direction: int) -> tuple[Tensor, ...]:
        key = (stage, m, direction)
        if key in self._given:
            return self._given.pop(key)
        channel, arriving = self._asked.pop(key)
        self.pipes.take(channel, arriving)
        self._begun = time.time()  # what came before was waiting
        assert arriving.form is not None
        if direction == FORWARD:
            self._forms[stage, m] = arriving.form
            for tensor, differentiable in zip(arriving.tensors, arriving.form.differentiable, strict=True):
                tensor.requires_grad_(differentiable)
        return arriving.tensors


def _like(tensor: Tensor, value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(tensor.dtype).expand_as(tensor)
    return torch.full_like(tensor, value)


def _cut(tensor: Tensor) -> Tensor:
    """The same values without their history; backward stops there, and its gradient is handed on."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
