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
from echelon.models.pipeline_model import Chain, Link
from echelon.parallel.apply import Parallel
from echelon.pipeline.actions import Action, Kind
from echelon.pipeline.async_.weight_versions import Versions
from echelon.pipeline.execution.p2p import Form
from echelon.pipeline.execution.runtime import Runtime, Work
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Lists, Schedule
from echelon.pipeline.schedules import make

Update = Callable[[float, float], None]
"""(what to multiply gradients by, learning rate): reduces nothing, changes the optimizer's copy of the weights"""


class StreamRuntime(Runtime):
    """The one stage of a rank."""

    def __init__(
        self,
        parallel: Parallel,
        chain: Chain,
        stages: Sequence[Sequence[Link]],
        schedule: Schedule,
        *,
        per_update: int,
    ):
        super().__init__(parallel, chain, stages, schedule)
        self.update: Update = _no_update
        self.per_update = per_update
        self.is_last = self.mine == (schedule.stages - 1,)
        self._scale = 1.0
        self.seed: float = 1.0
        self._begin()

    def start_from(self, scale: float, count: float) -> None:
        """The loss times this scale is what backward starts from; `count` targets are expected of the first update."""
        self._scale, self.seed = scale, scale / count

    def _begin(self) -> None:
        """A stream of which nothing has been done yet."""
        self.versions = Versions(self.parallel.flat)
        self._done, self._window = 0, 0
        self._under_way: dict[int, tuple[Work, float]] = {}
        self._losses: dict[int, Tensor] = {}
        self._started_from: dict[int, float] = {}
        self._at = 0

    # -- windows ------------------------------------------------------------------------------------------------------

    def window(self, works: Sequence[Work], lr: float) -> Tensor:
        """The next microbatches of the stream; (sum of losses, targets) of this rank's part of them."""
        self._under_way.update({number: (work, lr) for number, work in enumerate(works, self._done)})
        self.totals.zero_()
        self._window = len(works)
        self._run(self._lists(drain=False).lists)
        self._done += len(works)
        return self.totals

    def drain(self) -> None:
        """The backwards and updates that are left. The stream then starts again, from the weights it has made."""
        if self._done:
            self._done -= self._window
            done, whole = self._lists(drain=False).lists, self._lists(drain=True).lists
            assert all(full[: len(part)] == part for part, full in zip(done, whole, strict=True))
            self._run(tuple(full[len(part) :] for part, full in zip(done, whole, strict=True)))
        self.pipes.flush()
        self._begin()

    def window_lists(self) -> Schedule:
        """The lists of the last window."""
        return make(self.schedule.name, self.schedule.ranks, self._window, first=self._done - self._window, drain=False)

    def _lists(self, *, drain: bool) -> Schedule:
        return make(self.schedule.name, self.schedule.ranks, self._window, first=self._done, drain=drain)

    def _run(self, lists: Lists) -> None:
        schedule = Schedule(name=self.schedule.name, homes=self.schedule.homes, microbatches=self._window, lists=lists)
        self._works = {number: work for number, (work, _) in self._under_way.items()}
        for index, action in enumerate(lower(schedule).lists[self.rank]):
            self._do(action, index)
        # The first stage takes the news of an update as many windows later as there are stages, at most.
        self.pipes.retire(self.schedule.ranks)

    def _forwards(self, works: Sequence[Work], schedule: Schedule) -> None:
        """Evaluation, beside what is under way."""
        kept = self._passed, self._forms, self._given, self._asked
        self._passed, self._forms, self._given, self._asked = {}, {}, {}, {}
        super()._forwards(works, schedule)
        self._passed, self._forms, self._given, self._asked = kept

    def _sent(self) -> None:
        """Gradients that are under way are taken in a later window: nobody may wait for them here."""

    # -- actions ------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, index: int) -> None:
        if action.kind is Kind.KEEP:
            self.versions.keep(action.index)
        elif action.kind is Kind.DROP:
            self.versions.drop(action.index)
        elif action.kind is Kind.UPDATE:
            self._update(action.index)
        else:
            self._at = action.index // self.per_update
            with self.versions.use(action.version):
                super()._act(action, index)

    def _note(self, total: Tensor, count: Tensor) -> None:
        super()._note(total, count)
        if torch.is_grad_enabled():
            noted = self._losses.setdefault(self._at, torch.zeros_like(self.totals))
            noted[0] += total
            noted[1] += count

    def _backward(self, stage: int, m: int) -> None:
        if m % self.per_update == 0:
            self.units.begin_step()
            self._started_from[self._at] = self.seed
        self.seed = self._started_from[self._at]
        super()._backward(stage, m)

    def _close(self, stage: int, m: int, index: int) -> None:
        """Gradients are reduced when those of the update are all there."""
        self._forget(stage, m)
        if (m + 1) % self.per_update == 0:
            self.units.end_backward(0, last=True)

    def _update(self, version: int) -> None:
        self.units.finish()
        count, seed = self._told(version - 1)
        _, lr = self._under_way[version * self.per_update - 1]
        if count:
            self.update(1.0 / (seed * count), lr)
            self.seed = self._scale / count
        self.versions.updated(version)
        for number in range((version - 1) * self.per_update, version * self.per_update):
            del self._under_way[number]

    def _told(self, group: int) -> tuple[float, float]:
        """(targets, what backward started from) of an update, on every stage."""
        last = self.schedule.stages - 1
        source = self.schedule.homes[last]
        started = self._started_from.pop(group)
        if not self.is_last:
            channel = 2 * self.schedule.stages + self.rank
            arriving = self.pipes.take(channel, self.pipes.receive(channel, source, "update"))
            count, started = arriving.tensors[0].tolist()
            return count, started
        noted = self.parallel.tokens.all_reduce(self._losses.pop(group))
        count = float(noted[1])
        news = torch.tensor([count, started], dtype=torch.float64, device=noted.device)
        form = Form(((2,),), (torch.float64,), (False,), 0)
        for rank in range(self.schedule.ranks):
            if rank != source:
                self.pipes.send(2 * self.schedule.stages + rank, rank, "update", (news,), form)
        return count, started

    def news(self, updates: int) -> list[Collective]:
        """The cost of `_told`: counts are summed over all tokens on the last stage, which tells the others."""
        if not self.is_last:
            return []
        others, tokens = self.schedule.ranks - 1, self.parallel.tokens
        sent = Collective(kind="send", axis="pp", bytes=16, count=others * updates, hidden=True, part="news of updates")
        summed = Collective(kind="all_reduce", axis=tokens.name, bytes=16, count=updates, part="news of updates")
        return [sent, summed] if tokens.size > 1 else [sent]


def _no_update(_scale: float, _lr: float) -> None:
    raise AssertionError("an asynchronous pipeline was not told how to update")
