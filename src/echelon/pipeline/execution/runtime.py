"""One runtime for every schedule: it executes the actions of its rank in their order.

[Note: what stages exchange]

    stage s, microbatch m     F: inputs -> outputs         the outputs go to stage s + 1, cut off from the graph
                              B: d outputs -> d inputs     the inputs' gradients go to stage s - 1

A transfer between two ranks is a send and a receive in their actions. Two stages of one rank exchange tensors in
memory: the next stage takes them from where the first put them.
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

from echelon.layout.collective import Collective
from echelon.models.layers import check_loss_output
from echelon.parallel.dp.sharded_model import explain_freed_params
from echelon.parallel.parallel_model import ParallelModel
from echelon.pipeline.actions import RECEIVES, SENDS, Action, ActionKind
from echelon.pipeline.execution import split_backward
from echelon.pipeline.execution.p2p import P2PChannels, PendingReceive, TransferSpec
from echelon.pipeline.execution.stage_assignment import StageAssignment
from echelon.pipeline.execution.stage_io import NonLeafAlias, pack_tensors, unpack_tensors
from echelon.pipeline.execution.stage_param_groups import StageParamGroups
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.timeline import RELEASING_KINDS

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class MicrobatchInputs:
    """The inputs of one microbatch (or of one slice of it), on the device."""

    inputs: Mapping[str, Tensor]
    samples: Tensor
    full_inputs: Mapping[str, Tensor] | None = None
    """of a slice: the inputs of the full sequence"""
    slice_index: int = 0
    """of a slice: its position among the slices"""
    span: tuple[int, int, int] = (0, 0, 0)
    """of a slice: its start and stop, and the length of the sequence"""
    full_length: int = 0
    """under context parallelism: the tokens of the unsharded sequence"""

    @property
    def shape_key(self) -> Hashable:
        """A key of the shapes of all activations: equal keys mean equal shapes."""
        shapes = tuple((key, tuple(value.shape)) for key, value in sorted(self.inputs.items()))
        return shapes, torch.is_grad_enabled()


@dataclass
class SavedActivations:
    """The inputs and outputs of a stage that its backward needs, for one microbatch."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    deferred: list[split_backward.DeferredGrad] = field(default_factory=list)
    """the matmuls of weight gradients that W will compute"""


class PipelineRuntime:
    """Executes the stages of one rank. Schedule families with another runtime subclass it."""

    def __init__(self, parallel: ParallelModel, assignment: StageAssignment):
        self.parallel, self.pipeline_model = parallel, assignment.stages.pipeline_model
        self.schedule = schedule = assignment.schedule
        self.stage_layers = [assignment.stages.layers(stage) for stage in range(schedule.stages)]
        axis = parallel.axes["pp"]
        self._recorder = axis.recorder
        self.rank = axis.index
        self.local_stages = schedule.stages_on(self.rank)
        self._splits_backward = any(action.kind is ActionKind.INPUT_GRAD for action in schedule.rank_actions[self.rank])
        self.param_groups = StageParamGroups(parallel.sharded_model)
        self.p2p = P2PChannels(axis, parallel.options.device, 2 * schedule.stages + schedule.ranks)
        self.spans: list[tuple[str, float, float]] | None = None
        """(action, start, end) of every action, while a step is recorded; recording synchronizes the device"""
        self._action_start = 0.0
        self._num_slices = 1
        """per microbatch, in the schedule that runs now: evaluation does not slice"""
        self._microbatches: Mapping[int, MicrobatchInputs] = {}
        self._saved: dict[tuple[int, int], SavedActivations] = {}
        self._ready: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._pending_receives: dict[tuple[int, int, int], tuple[int, PendingReceive]] = {}
        self._specs: dict[tuple[int, int], TransferSpec] = {}
        self._last_backward: dict[int, int] = {}
        self.grad_seed: float | Tensor = 1.0
        """the gradient of the loss; a tensor where the host does not know its value"""
        self._logits_layer: Callable[..., Tensor] | None = None
        """runs in place of the last layer"""
        self._logits: Tensor | None = None
        self.totals = torch.zeros(2, dtype=torch.float64, device=parallel.options.device)

    # -- what other runtimes change -----------------------------------------------------------------------------------

    def slice_lengths(self, seq_len: int) -> tuple[int, ...]:
        """The lengths of a sequence's slices; empty where sequences are not sliced."""
        return ()

    def schedule_for(self, seq_len: int) -> Schedule:
        """The schedule of a step with sequences of this length."""
        return self.schedule

    def recorded_schedule(self) -> Schedule:
        """The schedule of the last step."""
        return self.schedule

    def update_collectives(self) -> list[Collective]:
        """What the updates of a step communicate between stages."""
        return []

    def drain(self) -> None:
        """Finish what is in flight between steps."""

    # -- one step -----------------------------------------------------------------------------------------------------

    def train(self, microbatches: Sequence[MicrobatchInputs], grad_seed: float | Tensor) -> Tensor:
        """Run every action of a step but the updates, up to the reduced gradients of the loss times `grad_seed`.

        The engine updates all stages at the end of the step: clipping needs the norm over all of them. Returns (sum of
        losses, number of valid targets) of this rank.
        """
        self._microbatches, self.grad_seed = dict(enumerate(microbatches)), grad_seed
        self._num_slices = self.schedule.slices
        self.totals.zero_()
        self.param_groups.begin_step()
        actions = self.schedule.rank_actions[self.rank]
        ends = [(index, action.stage) for index, action in enumerate(actions) if action.kind in RELEASING_KINDS]
        self._last_backward = {stage: index for index, stage in ends}
        for index, action in enumerate(actions):
            self._run_action(action, index)
        self.p2p.flush()
        self.param_groups.finish_step()
        return self.totals

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchInputs], schedule: Schedule) -> Tensor:
        """(sum of losses, number of valid targets) of this rank, by forwards alone."""
        self.totals.zero_()
        self._run_forwards(microbatches, schedule)
        return self.totals

    @torch.no_grad()
    def logits(self, microbatch: MicrobatchInputs, schedule: Schedule) -> Tensor | None:
        """The logits of one microbatch, on the rank of the last stage."""
        if self.pipeline_model.logits is None:
            raise ValueError(
                "the model's chain gives no logits; set `PipelineModel.logits`, or write no text (sample.tokens=0)"
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
        for group in self.parallel.sharded_model.param_groups:
            group.reshard()

    def _flush_sends(self) -> None:
        """Wait for the sends of an evaluation."""
        self.p2p.flush()

    def _run_action(self, action: Action, index: int) -> None:
        self._action_start = time.time()  # not perf_counter: ranks may be on several machines
        with explain_freed_params():
            self._dispatch(action, index)
        if self.spans is not None:
            if self.parallel.options.device.type == "cuda":
                torch.cuda.synchronize()
            # The clock may be set back. Until it has caught up, actions appear to take no time.
            start = max([self._action_start, *(end for _, _, end in self.spans[-1:])])
            self.spans.append((str(action), start, max(start, time.time())))

    def _dispatch(self, action: Action, index: int) -> None:
        kind, stage, m = action.kind, action.stage, action.index * self._num_slices + action.slice_index
        if kind is ActionKind.FORWARD:
            self._forward(stage, m)
        elif kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            self._backward(stage, m)
        if kind in RELEASING_KINDS:
            self._weight_backward(stage, m)
            self._end_backward(stage, m, index)
        elif kind is ActionKind.INPUT_GRAD:
            self.param_groups.reshard_layers(self.local_stages.index(stage))
        elif kind in SENDS:
            self._send(stage, m, FORWARD if kind is ActionKind.SEND_FORWARD else BACKWARD)
        elif kind in RECEIVES:
            self._post_receive(stage, m, FORWARD if kind is ActionKind.RECEIVE_FORWARD else BACKWARD)

    # -- compute ------------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        self._recorder.enter_phase("forward")
        microbatch = self._microbatches[m]
        inputs = self._receive(stage, m, FORWARD) if stage else ()
        self._set_microbatch(microbatch, stage, m)
        self.param_groups.unshard(self.local_stages.index(stage))
        saved = SavedActivations(inputs, ())
        with self._split_backward(saved), self.parallel.saved_tensor_context():
            hidden: Any = self._stage_input(stage, m, inputs) if stage else None
            shared = self._shared(microbatch)
            last = stage == self.schedule.stages - 1
            for layer in self.stage_layers[stage][:-1] if last and self._logits_layer else self.stage_layers[stage]:
                hidden = layer.run(hidden, shared, **microbatch.inputs)
        if last and self._logits_layer:
            self._logits = self._logits_layer(hidden, shared, **microbatch.inputs)
        elif last:
            total, count = check_loss_output(hidden)
            self._add_loss(total.detach(), count)
            saved.outputs = (total,)
        else:
            container, saved.outputs = unpack_tensors(hidden, layer.name)
            self._hand_over(stage + 1, m, FORWARD, tuple(_detach(tensor) for tensor in saved.outputs), container)
        self._saved[stage, m] = saved

    def _add_loss(self, total: Tensor, count: Tensor) -> None:
        """Add the loss of a microbatch to the totals."""
        self.totals[0] += total
        self.totals[1] += count

    def _backward(self, stage: int, m: int) -> None:
        self._recorder.enter_phase("backward")
        saved = self._saved[stage, m]
        self._set_microbatch(self._microbatches[m], stage, m)
        local_stage = self.local_stages.index(stage)
        self.param_groups.unshard(local_stage)
        self.param_groups.begin_backward(local_stage)
        outputs = [tensor for tensor in saved.outputs if tensor.requires_grad]
        if stage == self.schedule.stages - 1:
            gradients: Sequence[Tensor] = [_full_like(tensor, self.grad_seed) for tensor in outputs]
        else:
            gradients = self._receive(stage, m, BACKWARD)
        outputs, gradients = self._backward_roots(m, outputs, gradients)
        if outputs:
            with self._split_backward(saved):
                split_backward.backward_inside_mode(outputs, gradients)
        if stage:
            inputs = [tensor for tensor in saved.inputs if tensor.requires_grad]
            input_grads = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs)
            self._hand_over(stage - 1, m, BACKWARD, input_grads)
        saved.inputs = saved.outputs = ()

    def _weight_backward(self, stage: int, m: int) -> None:
        """Compute the weight gradients that the first half of backward deferred."""
        self._set_microbatch(self._microbatches[m], stage, m)
        unshard = partial(self.param_groups.unshard_layers, self.local_stages.index(stage))
        model = self.parallel.sharded_model
        split_backward.compute_weight_grads(
            self._saved[stage, m].deferred, model.add_deferred_grad, model.add_deferred_gemm, unshard
        )

    def _stage_input(self, stage: int, m: int, inputs: Sequence[Tensor]) -> Any:
        """What the layer before this stage returned, in the container that it used."""
        return pack_tensors(self._specs[stage, m].container, [NonLeafAlias.apply(tensor) for tensor in inputs])

    def _shared(self, microbatch: MicrobatchInputs) -> Any:
        return self.pipeline_model.shared(**microbatch.inputs)

    def _backward_roots(
        self, m: int, outputs: list[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The tensors that backward starts from, and their gradients."""
        return outputs, gradients

    def _end_backward(self, stage: int, m: int, index: int) -> None:
        self._release(stage, m)
        self.param_groups.end_backward(self.local_stages.index(stage), last=self._last_backward[stage] == index)

    def _release(self, stage: int, m: int) -> None:
        """Drop what a stage saved of a microbatch."""
        del self._saved[stage, m]
        self._specs.pop((stage, m), None)

    def _split_backward(self, saved: SavedActivations) -> AbstractContextManager[object]:
        return split_backward.DeferWeightGrads(saved.deferred) if self._splits_backward else nullcontext()

    def _set_microbatch(self, microbatch: MicrobatchInputs, stage: int, m: int) -> None:
        """Tell dropout, sequence and context parallelism which microbatch runs."""
        self.parallel.rng_stream.samples = microbatch.samples
        if self.parallel.cp_context is not None:
            self.parallel.cp_context.seq_len = microbatch.full_length
        spec = self._specs.get((stage, m))
        if self.parallel.tp_boundary is not None and spec is not None:
            self.parallel.tp_boundary.length = spec.full_length

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _hand_over(
        self, stage: int, m: int, direction: int, tensors: tuple[Tensor, ...], container: type = tuple
    ) -> None:
        """Make tensors available to another stage: at once on this rank, by a later send on another."""
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
        receiver = stage + 1 if direction == FORWARD else stage - 1
        tensors = self._ready.pop((receiver, m, direction))
        spec = self._specs.pop((receiver, m)) if direction == FORWARD else self._spec(tensors)
        channel, rank = 2 * stage + direction, self.schedule.rank_of_stage[receiver]
        self.p2p.send(channel, rank, self._microbatches[m].shape_key, tensors, spec)

    def _post_receive(self, stage: int, m: int, direction: int) -> None:
        sender = stage - 1 if direction == FORWARD else stage + 1
        channel = 2 * sender + direction
        pending = self.p2p.receive(channel, self.schedule.rank_of_stage[sender], self._microbatches[m].shape_key)
        self._pending_receives[stage, m, direction] = (channel, pending)

    def _receive(self, stage: int, m: int, direction: int) -> tuple[Tensor, ...]:
        key = (stage, m, direction)
        if key in self._ready:
            return self._ready.pop(key)
        channel, pending = self._pending_receives.pop(key)
        self.p2p.wait_for(channel, pending)
        self._action_start = time.time()  # waiting is not part of the action
        assert pending.spec is not None
        if direction == FORWARD:
            self._specs[stage, m] = pending.spec
            for tensor, differentiable in zip(pending.tensors, pending.spec.differentiable, strict=True):
                tensor.requires_grad_(differentiable)
        return pending.tensors


def _full_like(tensor: Tensor, value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(tensor.dtype).expand_as(tensor)
    return torch.full_like(tensor, value)


def _detach(tensor: Tensor) -> Tensor:
    """The tensor as a leaf: backward of the next stage ends there, and its gradient goes to the stage before."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
