"""The runtime of asynchronous schedules: an endless stream of microbatches, of which every step is a window.

[Note: what an update needs to know]

Backward starts, on the last stage, from loss scale / (targets of the update before). What that must be multiplied
by is known when the update's microbatches are through: the last stage sends it to the others, who have it long before
they need it, since their gradients come from the last stage too. Nobody waits for an update of another stage.

Norm and clipping are of one stage. An update without a target changes nothing, and still makes a version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.parallel.apply import ParallelModel
from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.async_.weight_versions import WeightVersions
from echelon.pipeline.execution.p2p import TransferSpec
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import RankActions, Schedule
from echelon.pipeline.schedules import make_schedule

UpdateFunction = Callable[[float, float], None]
"""(what to multiply gradients by, learning rate): reduces nothing, changes the optimizer's copy of the weights"""


class AsyncRuntime(PipelineRuntime):
    """The one stage of a rank."""

    def __init__(
        self,
        parallel: ParallelModel,
        pipeline_model: PipelineModel,
        stage_layers: Sequence[Sequence[PipelineLayer]],
        schedule: Schedule,
        *,
        microbatches_per_update: int,
    ):
        super().__init__(parallel, pipeline_model, stage_layers, schedule)
        self.update: UpdateFunction = _no_update
        self.microbatches_per_update = microbatches_per_update
        self.is_last = self.local_stages == (schedule.stages - 1,)
        self._loss_scale = 1.0
        self.grad_seed: float = 1.0
        self._reset_stream()

    def set_loss_scale(self, scale: float, count: float) -> None:
        """The loss times this scale is what backward starts from; `count` targets are expected of the first update."""
        self._loss_scale, self.grad_seed = scale, scale / count

    def _reset_stream(self) -> None:
        """A stream of which nothing has been done yet."""
        self.weight_versions = WeightVersions(self.parallel.sharded_model)
        self._completed, self._window_size = 0, 0
        self._in_flight: dict[int, tuple[MicrobatchInputs, float]] = {}
        self._losses: dict[int, Tensor] = {}
        self._grad_seeds: dict[int, float] = {}
        self._current_update = 0

    # -- windows ------------------------------------------------------------------------------------------------------

    def train_window(self, microbatches: Sequence[MicrobatchInputs], lr: float) -> Tensor:
        """The next microbatches of the stream; (sum of losses, targets) of this rank's part of them."""
        self._in_flight.update({number: (work, lr) for number, work in enumerate(microbatches, self._completed)})
        self.totals.zero_()
        self._window_size = len(microbatches)
        self._run_window(self._window_schedule(drain=False).rank_actions)
        self._completed += len(microbatches)
        return self.totals

    def drain(self) -> None:
        """The backwards and updates that are left. The stream then starts again, from the weights it has made."""
        if self._completed:
            self._completed -= self._window_size
            done, whole = (
                self._window_schedule(drain=False).rank_actions,
                self._window_schedule(drain=True).rank_actions,
            )
            assert all(full[: len(part)] == part for part, full in zip(done, whole, strict=True))
            self._run_window(tuple(full[len(part) :] for part, full in zip(done, whole, strict=True)))
        self.p2p.flush()
        self._reset_stream()

    def last_window(self) -> Schedule:
        """The lists of the last window."""
        return make_schedule(
            self.schedule.name,
            self.schedule.ranks,
            self._window_size,
            first_microbatch=self._completed - self._window_size,
            drain=False,
        )

    def _window_schedule(self, *, drain: bool) -> Schedule:
        return make_schedule(
            self.schedule.name, self.schedule.ranks, self._window_size, first_microbatch=self._completed, drain=drain
        )

    def _run_window(self, rank_actions: RankActions) -> None:
        schedule = Schedule(
            name=self.schedule.name,
            rank_of_stage=self.schedule.rank_of_stage,
            microbatches=self._window_size,
            rank_actions=rank_actions,
        )
        self._microbatches = {number: work for number, (work, _) in self._in_flight.items()}
        for index, action in enumerate(lower(schedule).rank_actions[self.rank]):
            self._run_action(action, index)
        # The first stage takes the news of an update as many windows later as there are stages, at most.
        self.p2p.flush_older(self.schedule.ranks)

    def _run_forwards(self, microbatches: Sequence[MicrobatchInputs], schedule: Schedule) -> None:
        """Evaluation, beside what is under way."""
        kept = self._saved, self._specs, self._ready, self._pending_receives
        self._saved, self._specs, self._ready, self._pending_receives = {}, {}, {}, {}
        super()._run_forwards(microbatches, schedule)
        self._saved, self._specs, self._ready, self._pending_receives = kept

    def _flush_sends(self) -> None:
        """Gradients that are under way are taken in a later window: nobody may wait for them here."""

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
            noted = self._losses.setdefault(self._current_update, torch.zeros_like(self.totals))
            noted[0] += total
            noted[1] += count

    def _backward(self, stage: int, m: int) -> None:
        if m % self.microbatches_per_update == 0:
            self.param_groups.begin_step()
            self._grad_seeds[self._current_update] = self.grad_seed
        self.grad_seed = self._grad_seeds[self._current_update]
        super()._backward(stage, m)

    def _end_backward(self, stage: int, m: int, index: int) -> None:
        """Gradients are reduced when those of the update are all there."""
        self._release(stage, m)
        if (m + 1) % self.microbatches_per_update == 0:
            self.param_groups.end_backward(0, last=True)

    def _update(self, version: int) -> None:
        self.param_groups.finish_step()
        count, seed = self._update_counts(version - 1)
        _, lr = self._in_flight[version * self.microbatches_per_update - 1]
        if count:
            self.update(1.0 / (seed * count), lr)
            self.grad_seed = self._loss_scale / count
        self.weight_versions.advance(version)
        for number in range((version - 1) * self.microbatches_per_update, version * self.microbatches_per_update):
            del self._in_flight[number]

    def _update_counts(self, update: int) -> tuple[float, float]:
        """(targets, what backward started from) of an update, on every stage."""
        last = self.schedule.stages - 1
        source = self.schedule.rank_of_stage[last]
        started = self._grad_seeds.pop(update)
        if not self.is_last:
            channel = 2 * self.schedule.stages + self.rank
            arriving = self.p2p.wait_for(channel, self.p2p.receive(channel, source, "update"))
            count, started = arriving.tensors[0].tolist()
            return count, started
        noted = self.parallel.token_axis.all_reduce(self._losses.pop(update))
        count = float(noted[1])
        news = torch.tensor([count, started], dtype=torch.float64, device=noted.device)
        form = TransferSpec(((2,),), (torch.float64,), (False,), 0)
        for rank in range(self.schedule.ranks):
            if rank != source:
                self.p2p.send(2 * self.schedule.stages + rank, rank, "update", (news,), form)
        return count, started

    def update_collectives(self, updates: int) -> list[Collective]:
        """The cost of `_told`: counts are summed over all tokens on the last stage, which tells the others."""
        if not self.is_last:
            return []
        others, tokens = self.schedule.ranks - 1, self.parallel.token_axis
        sent = Collective(
            op="send", axis="pp", bytes=16, count=others * updates, overlapped=True, purpose="news of updates"
        )
        summed = Collective(op="all_reduce", axis=tokens.name, bytes=16, count=updates, purpose="news of updates")
        return [sent, summed] if tokens.size > 1 else [sent]


def _no_update(_scale: float, _lr: float) -> None:
    raise AssertionError("an asynchronous pipeline was not told how to update")
