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

from echelon.models.lm_head import check_loss_output
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.parallel.apply import ParallelModel
from echelon.parallel.dp.sharded_model import explain_freed_params
from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.execution import split_backward
from echelon.pipeline.execution.fsdp_hooks import StageParamGroups
from echelon.pipeline.execution.p2p import P2PChannels, PendingReceive, TransferSpec
from echelon.pipeline.execution.stage_io import NonLeafAlias, pack_tensors, unpack_tensors
from echelon.pipeline.schedule import Schedule

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class MicrobatchInputs:
    """One microbatch's inputs, on the device."""

    inputs: Mapping[str, Tensor]
    samples: Tensor
    full_inputs: Mapping[str, Tensor] | None = None
    """of a slice: the inputs of the whole sequence"""
    slice_index: int = 0
    """of a slice: its number"""
    span: tuple[int, int, int] = (0, 0, 0)
    """of a slice: its start and stop, and the length of the sequence"""
    full_length: int = 0
    """under context parallelism: the tokens of the whole sequence"""

    @property
    def shape_key(self) -> Hashable:
        """What the shapes of everything that is made of it depend on."""
        shapes = tuple((key, tuple(value.shape)) for key, value in sorted(self.inputs.items()))
        return shapes, torch.is_grad_enabled()


@dataclass
class SavedActivations:
    """What a stage keeps of a microbatch between forward and backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    deferred: list[split_backward.WeightGradInputs] = field(default_factory=list)
    """products of weight gradients that were put off"""


class PipelineRuntime:
    """The stages of one rank."""

    def __init__(
        self,
        parallel: ParallelModel,
        pipeline_model: PipelineModel,
        stage_layers: Sequence[Sequence[PipelineLayer]],
        schedule: Schedule,
    ):
        self.parallel, self.pipeline_model, self.stage_layers, self.schedule = (
            parallel,
            pipeline_model,
            stage_layers,
            schedule,
        )
        axis = parallel.axes["pp"]
        self._recorder = axis.recorder
        self.rank = axis.index
        self.local_stages = schedule.stages_on(self.rank)
        self._splits_backward = any(action.kind is ActionKind.INPUT_GRAD for action in schedule.rank_actions[self.rank])
        self.param_groups = StageParamGroups(parallel.sharded_model)
        self.p2p = P2PChannels(axis, parallel.options.device, 2 * schedule.stages + schedule.ranks)
        self.spans: list[tuple[str, float, float]] | None = None
        """(action, start, end) of the actions of a step that is recorded; a recorded step waits for the device"""
        self._action_start = 0.0
        self._num_slices = 1
        """of a microbatch, in the schedule that is being run: evaluation does not slice"""
        self._microbatches: Mapping[int, MicrobatchInputs] = {}
        self._saved: dict[tuple[int, int], SavedActivations] = {}
        self._ready: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._pending_receives: dict[tuple[int, int, int], tuple[int, PendingReceive]] = {}
        self._specs: dict[tuple[int, int], TransferSpec] = {}
        self._last_backward: dict[int, int] = {}
        self.grad_seed: float | Tensor = 1.0
        """what backward starts from; as a tensor it is not known to the host"""
        self._logits_layer: Callable[..., Tensor] | None = None
        """what runs instead of the last link"""
        self._logits: Tensor | None = None
        self.totals = torch.zeros(2, dtype=torch.float64, device=parallel.options.device)

    # -- one step -----------------------------------------------------------------------------------------------------

    def train(self, microbatches: Sequence[MicrobatchInputs], grad_seed: float | Tensor) -> Tensor:
        """Every action of the schedule but the updates: those of a step need the norm over all stages, so whoever holds
        the optimizer makes them together at the end. (sum of losses, number of targets) of this rank.
        """
        self._microbatches, self.grad_seed, self._num_slices = (
            dict(enumerate(microbatches)),
            grad_seed,
            self.schedule.slices,
        )
        self.totals.zero_()
        self.param_groups.begin_step()
        actions = self.schedule.rank_actions[self.rank]
        ends = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
        self._last_backward = {action.stage: index for index, action in enumerate(actions) if action.kind in ends}
        for index, action in enumerate(actions):
            self._run_action(action, index)
        self.p2p.flush()
        self.param_groups.finish_step()
        return self.totals

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchInputs], schedule: Schedule) -> Tensor:
        """The totals of forwards alone."""
        self.totals.zero_()
        self._run_forwards(microbatches, schedule)
        return self.totals

    @torch.no_grad()
    def logits(self, microbatch: MicrobatchInputs, schedule: Schedule) -> Tensor | None:
        """What the model says of one batch, on the rank of the last stage."""
        if self.pipeline_model.logits is None:
            raise ValueError(
                "the model's chain gives no logits; set `Chain.logits`, or write no text (sample.tokens=0)"
            )
        self._logits = None
        self._logits_layer = self.pipeline_model.logits
        try:
            self._run_forwards([microbatch], schedule)
        finally:
            self._logits_layer = None
        return self._logits

    def _run_forwards(self, microbatches: Sequence[MicrobatchInputs], schedule: Schedule) -> None:
        self._microbatches, self._num_slices = dict(enumerate(microbatches)), schedule.slices
        for index, action in enumerate(schedule.rank_actions[self.rank]):
            self._run_action(action, index)
        self._flush_sends()
        self._saved.clear()
        self._specs.clear()
        for unit in self.parallel.sharded_model.param_groups:
            unit.reshard()

    def _flush_sends(self) -> None:
        """After an evaluation: its messages are out."""
        self.p2p.flush()

    def _run_action(self, action: Action, index: int) -> None:
        self._action_start = time.time()  # not perf_counter: ranks may be on several machines
        with explain_freed_params():
            self._dispatch(action, index)
        if self.spans is not None:
            if self.parallel.options.device.type == "cuda":
                torch.cuda.synchronize()
            # A clock may be set back. Then actions seem to take no time, for as long as it was.
            begun = max([self._action_start, *(end for _, _, end in self.spans[-1:])])
            self.spans.append((str(action), begun, max(begun, time.time())))

    def _dispatch(self, action: Action, index: int) -> None:
        kind, stage, m = action.kind, action.stage, action.index * self._num_slices + action.slice_index
        if kind is ActionKind.FORWARD:
            self._forward(stage, m)
        elif kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            self._backward(stage, m)
            if kind is ActionKind.BACKWARD:
                self._weight_backward(stage, m)
                self._end_backward(stage, m, index)
            else:
                self.param_groups.reshard_layers(self.local_stages.index(stage))
        elif kind is ActionKind.WEIGHT_GRAD:
            self._weight_backward(stage, m)
            self._end_backward(stage, m, index)
        elif kind is ActionKind.SEND_FORWARD:
            self._send(stage, m, FORWARD)
        elif kind is ActionKind.SEND_BACKWARD:
            self._send(stage, m, BACKWARD)
        elif kind is ActionKind.RECEIVE_FORWARD:
            self._post_receive(stage, m, FORWARD)
        elif kind is ActionKind.RECEIVE_BACKWARD:
            self._post_receive(stage, m, BACKWARD)

    # -- compute ------------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        self._recorder.enter_phase("forward")
        work = self._microbatches[m]
        inputs = self._receive(stage, m, FORWARD) if stage else ()
        self._set_microbatch(work, stage, m)
        self.param_groups.unshard(self.local_stages.index(stage))
        passed = SavedActivations(inputs, ())
        with self._split_backward(passed), self.parallel.saved_tensor_context():
            carried: Any = self._stage_input(stage, m, inputs) if stage else None
            shared = self._shared(work)
            last = stage == self.schedule.stages - 1
            for link in self.stage_layers[stage][:-1] if last and self._logits_layer else self.stage_layers[stage]:
                carried = link.run(carried, shared, **work.inputs)
        if last and self._logits_layer:
            self._logits = self._logits_layer(carried, shared, **work.inputs)
        elif last:
            total, count = check_loss_output(carried)
            self._add_loss(total.detach(), count)
            passed.outputs = (total,)
        else:
            holder, passed.outputs = unpack_tensors(carried, link.name)
            self._hand_over(stage + 1, m, FORWARD, tuple(_detach(tensor) for tensor in passed.outputs), holder)
        self._saved[stage, m] = passed

    def _add_loss(self, total: Tensor, count: Tensor) -> None:
        """A microbatch's loss is known."""
        self.totals[0] += total
        self.totals[1] += count

    def _backward(self, stage: int, m: int) -> None:
        self._recorder.enter_phase("backward")
        passed = self._saved[stage, m]
        self._set_microbatch(self._microbatches[m], stage, m)
        part = self.local_stages.index(stage)
        self.param_groups.unshard(part)
        self.param_groups.begin_backward(part)
        outputs = [tensor for tensor in passed.outputs if tensor.requires_grad]
        if stage == self.schedule.stages - 1:
            gradients: Sequence[Tensor] = [_full_like(tensor, self.grad_seed) for tensor in outputs]
        else:
            gradients = self._receive(stage, m, BACKWARD)
        outputs, gradients = self._backward_roots(m, outputs, gradients)
        if outputs:
            with self._split_backward(passed):
                split_backward.backward_inside_mode(outputs, gradients)
        wanted = [tensor for tensor in passed.inputs if tensor.requires_grad]
        if stage:
            made = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in wanted)
            self._hand_over(stage - 1, m, BACKWARD, made)
        passed.inputs = passed.outputs = ()

    def _weight_backward(self, stage: int, m: int) -> None:
        """The second half of backward: what was put off."""
        self._set_microbatch(self._microbatches[m], stage, m)
        ready = partial(self.param_groups.unshard_layers, self.local_stages.index(stage))
        split_backward.compute_weight_grads(
            self._saved[stage, m].deferred, self.parallel.sharded_model.add_deferred_grad, ready
        )

    def _stage_input(self, stage: int, m: int, inputs: Sequence[Tensor]) -> Any:
        """What the stage's first link is given: what the link before it gave."""
        return pack_tensors(self._specs[stage, m].container, [NonLeafAlias.apply(tensor) for tensor in inputs])

    def _shared(self, microbatch: MicrobatchInputs) -> Any:
        return self.pipeline_model.shared(**microbatch.inputs)

    def _backward_roots(
        self, m: int, outputs: list[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """What backward starts from."""
        return outputs, gradients

    def _end_backward(self, stage: int, m: int, index: int) -> None:
        self._release(stage, m)
        self.param_groups.end_backward(self.local_stages.index(stage), last=self._last_backward[stage] == index)

    def _release(self, stage: int, m: int) -> None:
        """After its backward nothing of a microbatch is needed."""
        del self._saved[stage, m]
        self._specs.pop((stage, m), None)

    def _split_backward(self, saved: SavedActivations) -> AbstractContextManager[object]:
        return split_backward.DeferWeightGrads(saved.deferred) if self._splits_backward else nullcontext()

    def _set_microbatch(self, microbatch: MicrobatchInputs, stage: int, m: int) -> None:
        """Dropout, sequence and context parallelism are told which microbatch this is."""
        self.parallel.rng_stream.samples = microbatch.samples
        if self.parallel.cp_context is not None:
            self.parallel.cp_context.seq_len = microbatch.full_length
        form = self._specs.get((stage, m))
        if self.parallel.tp_boundary is not None and form is not None:
            self.parallel.tp_boundary.length = form.full_length

    # -- handing on ---------------------------------------------------------------------------------------------------

    def _hand_over(
        self, stage: int, m: int, direction: int, tensors: tuple[Tensor, ...], container: type = tuple
    ) -> None:
        """Puts down what another stage needs: it is there at once for one of this rank, others are sent it."""
        self._ready[stage, m, direction] = tensors
        if direction == FORWARD:
            self._specs[stage, m] = self._spec(tensors, container)

    def _spec(self, tensors: tuple[Tensor, ...], container: type = tuple) -> TransferSpec:
        return TransferSpec(
            tuple(tuple(t.shape) for t in tensors),
            tuple(t.dtype for t in tensors),
            tuple(t.requires_grad for t in tensors),
            self.parallel.tp_boundary.length if self.parallel.tp_boundary is not None else 0,
            container,
        )

    def _send(self, stage: int, m: int, direction: int) -> None:
        to = stage + 1 if direction == FORWARD else stage - 1
        tensors = self._ready.pop((to, m, direction))
        form = self._specs.pop((to, m)) if direction == FORWARD else self._spec(tensors)
        self.p2p.send(
            2 * stage + direction, self.schedule.rank_of_stage[to], self._microbatches[m].shape_key, tensors, form
        )

    def _post_receive(self, stage: int, m: int, direction: int) -> None:
        sender = stage - 1 if direction == FORWARD else stage + 1
        channel = 2 * sender + direction
        arriving = self.p2p.receive(channel, self.schedule.rank_of_stage[sender], self._microbatches[m].shape_key)
        self._pending_receives[stage, m, direction] = (channel, arriving)

    def _receive(self, stage: int, m: int, direction: int) -> tuple[Tensor, ...]:
        key = (stage, m, direction)
        if key in self._ready:
            return self._ready.pop(key)
        channel, arriving = self._pending_receives.pop(key)
        self.p2p.wait_for(channel, arriving)
        self._action_start = time.time()  # what came before was waiting
        assert arriving.spec is not None
        if direction == FORWARD:
            self._specs[stage, m] = arriving.spec
            for tensor, differentiable in zip(arriving.tensors, arriving.spec.differentiable, strict=True):
                tensor.requires_grad_(differentiable)
        return arriving.tensors


def _full_like(tensor: Tensor, value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(tensor.dtype).expand_as(tensor)
    return torch.full_like(tensor, value)


def _detach(tensor: Tensor) -> Tensor:
    """The same values without their history; backward stops there, and its gradient is handed on."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
