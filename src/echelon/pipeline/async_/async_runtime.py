"""The runtime of asynchronous schedules: an endless stream of microbatches, of which every step is a window.

[Note: the scale of an update]

Backward starts, on the last stage, from loss scale / (targets of the previous update). The factor that corrects it to
the targets of this update is known when the last stage has run all microbatches of the update. It sends the factor to
the other stages, which receive it long before they need it, since their gradients come from the last stage too. No
stage waits for the update of another.

Gradient norm and clipping are per stage. An update without a valid target changes no weight, and still counts as a
version.

[Note: a dynamic loss scale]

The last stage chooses the scale of an update when its backward begins. A stage whose gradients overflow leaves that
update out, alone: later stages have updated already, and earlier ones get gradients that are not finite too, or fine
ones. Every stage reports to the last one whether its gradients were finite. The last stage reads the reports of update
u - lag before the backward of update u, with lag = 1 + ceil((stages - 1) / microbatches per update): the first stage
has made them by then, so that no stage waits. An overflow of any stage halves the scale, once
(precision/loss_scale.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.parallel.parallel_model import ParallelModel
from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.async_.weight_versions import WeightVersions
from echelon.pipeline.execution.p2p import TransferSpec
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.execution.stage_assignment import StageAssignment
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import RankActions, Schedule
from echelon.pipeline.schedules import make_schedule, updates_per_step
from echelon.precision.loss_scale import DelayedLossScaler, LossScale, LossScaler

UpdateFunction = Callable[[float, float], Tensor]
"""(gradient scale, learning rate): clips and updates the master weights of this stage; whether gradients were finite"""


REPORT_SPEC, SCALE_SPEC = (TransferSpec(((size,),), (torch.float64,), (False,), 0) for size in (1, 2))


class AsyncRuntime(PipelineRuntime):
    """Executes the one stage of a rank, window by window."""

    def __init__(self, parallel: ParallelModel, assignment: StageAssignment):
        super().__init__(parallel, assignment)
        if tied := [param.name for param in parallel.placement.params.values() if param.tied_pp_ranks]:
            raise ValueError(
                f"schedule={parallel.layout.schedule} updates every stage independently, and {tied[0]} is on several "
                "stages; untie it (tied=false), or use schedule=1f1b"
            )
        self.update: UpdateFunction = _no_update
        self.updates_per_step = updates_per_step(parallel.layout)
        self.microbatches_per_update = parallel.layout.accumulate // self.updates_per_step
        self.is_last = self.local_stages == (self.schedule.stages - 1,)
        self.report_lag = 1 + -(-(self.schedule.stages - 1) // self.microbatches_per_update)
        """updates after which all stages have reported"""
        self.loss_scaler = DelayedLossScaler(LossScaler(LossScale(), torch.device("cpu")))
        self.grad_seed: float = 1.0
        """loss scale / number of targets of the previous update"""
        self._reset_stream()

    def expect_targets(self, num_targets: float) -> None:
        """Expect the first update to have `num_targets`."""
        self.grad_seed = self.loss_scaler.scale / num_targets

    def _reset_stream(self) -> None:
        """Begin a new stream from the weights in force."""
        self.weight_versions = WeightVersions(self.parallel.sharded_model)
        self._completed, self._window_size = 0, 0
        self._in_flight: dict[int, tuple[MicrobatchInputs, float]] = {}
        self._losses: dict[int, Tensor] = {}
        self._grad_seeds: dict[int, float] = {}
        self._current_update = 0
        self._num_reported = 0
        self._own_reports: dict[int, tuple[bool, bool]] = {}
        """(gradients were finite, there were targets) of this stage's updates, on the last stage"""

    # -- windows ------------------------------------------------------------------------------------------------------

    def train_window(self, microbatches: Sequence[MicrobatchInputs], update: UpdateFunction, lr: float) -> Tensor:
        """Run the next microbatches of the stream; (sum of losses, number of valid targets) of this rank."""
        self.update = update
        if not self._completed:
            self.loss_scaler.begin_stream()
        self._in_flight.update({m: (microbatch, lr) for m, microbatch in enumerate(microbatches, self._completed)})
        self.totals.zero_()
        self._window_size = len(microbatches)
        self._run_window(self._window_schedule(self._completed).rank_actions)
        self._completed += len(microbatches)
        return self.totals

    def drain(self) -> None:
        """Run the backwards and updates that are left, and begin a new stream from the resulting weights."""
        if self._completed:
            self._completed -= self._window_size
            done = self._window_schedule(self._completed).rank_actions
            drained = self._window_schedule(self._completed, drain=True).rank_actions
            assert all(full[: len(part)] == part for part, full in zip(done, drained, strict=True))
            self._run_window(tuple(full[len(part) :] for part, full in zip(done, drained, strict=True)))
            self._share_loss_scale()
        self.p2p.flush()
        self._reset_stream()

    def recorded_schedule(self) -> Schedule:
        """The schedule of the last window."""
        return self._window_schedule(self._completed - self._window_size)

    def _window_schedule(self, first_microbatch: int, *, drain: bool = False) -> Schedule:
        name, ranks = self.schedule.name, self.schedule.ranks
        return make_schedule(name, ranks, self._window_size, first_microbatch=first_microbatch, drain=drain)

    def _run_window(self, rank_actions: RankActions) -> None:
        schedule = replace(self.schedule, microbatches=self._window_size, rank_actions=rank_actions)
        self._microbatches = {m: microbatch for m, (microbatch, _) in self._in_flight.items()}
        for index, action in enumerate(lower(schedule).rank_actions[self.rank]):
            self._run_action(action, index)
        # The first stage receives the scale of an update at most as many windows later as there are stages.
        self.p2p.flush(self.schedule.ranks)

    def _run_forwards(self, microbatches: Sequence[MicrobatchInputs], schedule: Schedule) -> None:
        """Evaluate without touching the microbatches in flight."""
        stream = self._saved, self._specs, self._ready, self._pending_receives
        self._saved, self._specs, self._ready, self._pending_receives = {}, {}, {}, {}
        super()._run_forwards(microbatches, schedule)
        self._saved, self._specs, self._ready, self._pending_receives = stream

    def _flush_sends(self) -> None:
        """Wait for nothing: a later window receives the gradients that are in flight."""

    # -- actions ------------------------------------------------------------------------------------------------------

    def _dispatch(self, action: Action, index: int) -> None:
        if action.kind is ActionKind.STASH:
            self.weight_versions.stash(action.index)
        elif action.kind is ActionKind.DROP_STASHED:
            self.weight_versions.drop(action.index)
        elif action.kind is ActionKind.UPDATE:
            self._update(action.index)
        else:
            self._current_update = action.index // self.microbatches_per_update
            with self.weight_versions.using(action.version):
                super()._dispatch(action, index)

    def _add_loss(self, total: Tensor, count: Tensor) -> None:
        super()._add_loss(total, count)
        if torch.is_grad_enabled():
            losses = self._losses.setdefault(self._current_update, torch.zeros_like(self.totals))
            losses[0] += total
            losses[1] += count

    def _backward(self, stage: int, m: int) -> None:
        if m % self.microbatches_per_update == 0:
            self.param_groups.begin_step()
            if self.is_last and self.loss_scaler.recipe.is_dynamic:
                self._read_reports(self._current_update - self.report_lag)
                self.loss_scaler.begin(self._current_update)
            self._grad_seeds[self._current_update] = self.grad_seed
        self.grad_seed = self._grad_seeds[self._current_update]
        super()._backward(stage, m)

    def _end_backward(self, stage: int, m: int, index: int) -> None:
        """Reduce gradients after the last microbatch of an update."""
        self._release(stage, m)
        if (m + 1) % self.microbatches_per_update == 0:
            self.param_groups.end_backward(0, last=True)

    def _update(self, version: int) -> None:
        self.param_groups.finish_step()
        num_targets, grad_seed = self._exchange_update_scale(version - 1)
        _, lr = self._in_flight[version * self.microbatches_per_update - 1]
        finite = True
        if num_targets:
            all_finite = self.update(1.0 / (grad_seed * num_targets), lr)
            finite = bool(all_finite) if self.loss_scaler.recipe.is_dynamic else True
            self.grad_seed = self.loss_scaler.scale / num_targets
        if self.loss_scaler.recipe.is_dynamic:
            self._report(version - 1, finite, num_targets > 0)
        self.weight_versions.advance(version)
        for m in range((version - 1) * self.microbatches_per_update, version * self.microbatches_per_update):
            del self._in_flight[m]

    def _exchange_update_scale(self, update: int) -> tuple[float, float]:
        """(number of targets, gradient seed) of an update, sent from the last stage to every other."""
        last_rank = self.schedule.rank_of_stage[-1]
        grad_seed = self._grad_seeds.pop(update)
        if not self.is_last:
            channel = 2 * self.schedule.stages + self.rank
            received = self.p2p.wait_for(channel, self.p2p.receive(channel, last_rank, "update"))
            num_targets, grad_seed = received.tensors[0].tolist()
            return num_targets, grad_seed
        losses = self.parallel.token_axis.all_reduce(self._losses.pop(update))
        num_targets = float(losses[1])
        scale = torch.tensor([num_targets, grad_seed], dtype=torch.float64, device=losses.device)
        for rank in range(self.schedule.ranks):
            if rank != last_rank:
                self.p2p.send(2 * self.schedule.stages + rank, rank, "update", (scale,), SCALE_SPEC)
        return num_targets, grad_seed

    # -- a dynamic loss scale: see the note ---------------------------------------------------------------------------

    def _report(self, update: int, finite: bool, had_targets: bool) -> None:
        """Tell the last stage whether this stage's gradients of an update were finite."""
        if self.is_last:
            self._own_reports[update] = finite, had_targets
            return
        last_rank = self.schedule.rank_of_stage[-1]
        report = torch.tensor([float(finite)], dtype=torch.float64, device=self.totals.device)
        self.p2p.send(2 * self.schedule.stages + last_rank, last_rank, f"report of {self.rank}", (report,), REPORT_SPEC)

    def _read_reports(self, last_update: int) -> None:
        """On the last stage, wait for the reports of all updates up to one."""
        while self._num_reported <= last_update:
            update, channel = self._num_reported, 2 * self.schedule.stages + self.rank
            finite, had_targets = self._own_reports.pop(update)
            for rank in range(self.schedule.ranks):
                if rank != self.rank:
                    pending = self.p2p.receive(channel, rank, f"report of {rank}")
                    finite &= bool(self.p2p.wait_for(channel, pending).tensors[0].item())
            before = self.loss_scaler.scale
            self.loss_scaler.report(update, finite=finite, had_targets=had_targets)
            self.grad_seed *= self.loss_scaler.scale / before
            self._num_reported += 1

    def _share_loss_scale(self) -> None:
        """At the end of a stream, read all reports and send the scale to every stage: a checkpoint has it."""
        scaler = self.loss_scaler
        if not scaler.recipe.is_dynamic:
            return
        last_rank = self.schedule.rank_of_stage[-1]
        if self.is_last:
            self._read_reports(max(self._own_reports, default=-1))
            state = torch.tensor([scaler.scale, scaler.good_updates], dtype=torch.float64, device=self.totals.device)
            for rank in range(self.schedule.ranks):
                if rank != last_rank:
                    self.p2p.send(2 * self.schedule.stages + rank, rank, "scale", (state,), SCALE_SPEC)
        else:
            channel = 2 * self.schedule.stages + self.rank
            received = self.p2p.wait_for(channel, self.p2p.receive(channel, last_rank, "scale"))
            scale, good_updates = received.tensors[0].tolist()
            self.grad_seed *= scale / scaler.scale
            scaler.scale, scaler.good_updates = scale, int(good_updates)
        scaler.write()

    # -- cost ---------------------------------------------------------------------------------------------------------

    def update_collectives(self) -> list[Collective]:
        """The cost of `_exchange_update_scale` and of reports in a step."""
        count, tokens, purpose = self.updates_per_step, self.parallel.token_axis, "update scale"
        if not self.is_last:
            report = Collective(op="send", axis="pp", bytes=8, count=count, overlapped=True, purpose="loss scale")
            return [report] if self.loss_scaler.recipe.is_dynamic else []
        sends = (self.schedule.ranks - 1) * count
        sent = Collective(op="send", axis="pp", bytes=16, count=sends, overlapped=True, purpose=purpose)
        summed = Collective(op="all_reduce", axis=tokens.name, bytes=16, count=count, purpose=purpose)
        return [sent, summed] if tokens.size > 1 else [sent]


def _no_update(_scale: float, _lr: float) -> Tensor:
    raise AssertionError("an asynchronous pipeline has no update function before its first window")
