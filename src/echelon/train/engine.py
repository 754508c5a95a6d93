"""One training step of a laid-out model: microbatches, reductions, norm, update.

The loss contract: the model returns (sum of losses, number of valid targets). Gradients of the sum are added up over
microbatches and ranks, counts likewise, and the division happens once.

[Note: the division that is already done]

A step's number of valid targets is known when its last microbatch is through, and is nearly always that of the step
before. So backward starts from 1 / (the last step's number) instead of 1, and what is left to multiply all gradients by
is last / this, times clipping: exactly 1, and no pass over the gradients, where the number is the same and clipping
does not bind.

[Note: nobody waits for the device]

The number, the norm, and whether there was a target at all stay on the device, as tensors, and so do the backward seed
and the optimizer's factor that follow from them. The host only ever queues work, so it can be a step ahead of a GPU.
What a step did is read when somebody asks its `StepResult`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from echelon.kernels import choice
from echelon.layout import Layout, check
from echelon.layout.cost import Collective
from echelon.layout.layout import ASYNCHRONOUS
from echelon.memory.budget import Budgeted
from echelon.memory.repeated import repeated
from echelon.models.head import loss_pair
from echelon.models.sizes import ModelConfig
from echelon.optim import cost, groups, hosted
from echelon.optim.average import Average
from echelon.optim.choose import sharded
from echelon.optim.held import Update, runs_of
from echelon.optim.rule import Rule
from echelon.parallel.apply import Options, Parallel, apply
from echelon.parallel.axis import world_size
from echelon.parallel.flat import explained
from echelon.parallel.tensor import Traffic
from echelon.pipeline.pipeline import Pipeline
from echelon.pipeline.runtime import Work
from echelon.train import in_backward, issued
from echelon.train.in_backward import InBackward
from echelon.train.later import later, sent
from echelon.train.loads import Loads, mixtures_of
from echelon.train.norm import GradientNorm, clip_factor
from echelon.train.partial import partial_gradients, sum_held
from echelon.train.result import StepResult
from echelon.train.sections import OptimizerConfig

Batch = Mapping[str, Tensor]
"""the model's keyword arguments; the first dimension of each is samples"""


@dataclass(frozen=True)
class Microbatch:
    inputs: Batch
    samples: Tensor
    """global sample index of each row"""


def shape_of(model: nn.Module) -> ModelConfig | None:
    """The shape of a model of ours; a user's module has none that we know."""
    config = getattr(model, "config", None)
    return config if isinstance(config, ModelConfig) else None


class Engine:
    """A one-device model, laid out, with its optimizer. `step` takes the global batch; every rank picks its rows."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout | str = "",
        optimizer: Rule | None = None,
        *,
        clip: float = 0.0,
        options: Options | None = None,
    ):
        layout = check(str(layout), world=world_size(), model=shape_of(model))
        if layout.plan_only:
            raise ValueError("; ".join(layout.plan_only))
        self.rule: Rule = optimizer or OptimizerConfig()
        self.clip = clip
        if self.rule.in_backward:
            in_backward.refuse(layout, clip)
        hosted.check(self.rule, layout.offload)
        options = options or Options()
        options = replace(options, state_bytes=cost.element_bytes(self.rule, options.master.itemsize))
        if self.rule.ema and layout.pp > 1 and layout.schedule in ASYNCHRONOUS:
            raise ValueError(
                f"older versions of the weights are under way when an evaluation would use their average "
                f"(schedule={layout.schedule}, optimizer.ema={self.rule.ema:g}); use schedule=1f1b, or ema=0"
            )
        self.names = tuple(name for name, _ in model.named_parameters())
        """of all parameters of the model, wherever they are"""
        groups.check(self.rule, self.names)
        mixtures = mixtures_of(model, layout)
        self.pipeline: Pipeline | None = None
        if layout.pp > 1:
            self.pipeline = Pipeline(model, layout, options)
        self.parallel: Parallel = self.pipeline.parallel if self.pipeline else apply(model, layout, options)
        self.model, self.layout = self.parallel.model, layout
        self.norm = GradientNorm(self.parallel)
        self._partial = partial_gradients(self.parallel)
        self.in_backward: InBackward | None = None
        if self.rule.in_backward:
            self.in_backward = InBackward(self.parallel, self.rule, self.norm, self._partial)
        self.optimizer: Update = self.in_backward.optimizer if self.in_backward else sharded(self.parallel, self.rule)
        self.average = Average(runs_of(self.parallel, self.rule), self.rule.ema) if self.rule.ema else None
        self._averaged = False
        self.loads = Loads(self.parallel, mixtures)
        self.num_steps = 0
        self._last_count = torch.ones((), dtype=torch.float64, device=self.parallel.options.device)

    @property
    def loss_axis(self) -> str:
        """The axis over which sums of losses and numbers of targets are added up."""
        tokens = self.parallel.tokens.name
        return f"pp*{tokens}" if self.layout.pp > 1 else tokens

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, lr: float | None = None) -> StepResult:
        """Trains on the global batch, any multiple of dp x accumulate rows, which every rank is given alike."""
        return self.run(self.microbatches(batch), lr=lr)

    def microbatches(self, batch: Batch) -> Iterator[Microbatch]:
        if not batch:
            raise ValueError("the batch is empty; give the model's keyword arguments as tensors")
        rows = len(next(iter(batch.values())))
        layout = self.layout
        if not rows:
            raise ValueError("the batch has no rows; give at least one for each rank of dp and microbatch")
        if rows % (layout.dp * layout.accumulate):
            raise ValueError(
                f"the batch does not divide over dp x accumulate ({rows} rows over {layout.dp} x {layout.accumulate}); "
                f"use a multiple of {layout.dp * layout.accumulate}"
            )
        for samples in self.rows(rows):
            inputs = {key: value[samples.start : samples.stop] for key, value in batch.items()}
            numbers = torch.arange(samples.start, samples.stop) + self.num_steps * rows
            yield Microbatch(inputs, numbers)

    def rows(self, batch: int) -> Iterator[range]:
        """This rank's rows of a global batch, microbatch by microbatch."""
        dp, accumulate = self.layout.dp, self.layout.accumulate
        size = batch // (dp * accumulate)
        for index in range(accumulate):
            start = (index * dp + self.parallel.axes.at["dp"]) * size
            yield range(start, start + size)

    def run(self, microbatches: Iterable[Microbatch], *, lr: float | None = None) -> StepResult:
        """Trains on this rank's own `accumulate` microbatches."""
        if isinstance(self.parallel.recomputed, Budgeted) and self.parallel.recomputed.undecided:
            microbatches = self._rehearsed(iter(microbatches))
        with self._kernels():
            return self._run(self._counted(microbatches), self.rule.lr if lr is None else lr)

    def _rehearsed(self, microbatches: Iterator[Microbatch]) -> Iterator[Microbatch]:
        first = list(islice(microbatches, 1))
        for microbatch in first:
            self.rehearse(microbatch)
        return chain(first, microbatches)

    @torch.no_grad()
    def rehearse(self, microbatch: Microbatch) -> None:
        """Decides what each layer keeps (recompute=budget) by a forward pass that changes nothing; all ranks do."""
        found, parallel = self.parallel.recomputed, self.parallel
        if isinstance(found, Budgeted):
            counted = repeated(self.model, parallel.stream, self._samples(microbatch))
            with self._kernels(), counted, found.rehearsal(parallel.options.device):
                self._totals([microbatch])

    def _kernels(self) -> AbstractContextManager[None]:
        return choice.plain() if self.parallel.options.kernels == "plain" else nullcontext()

    def _run(self, microbatches: Iterable[Microbatch], lr: float) -> StepResult:
        if self.pipeline is not None:
            works = self._works(microbatches)
            if self.pipeline.asynchronous:
                return self._window(self.pipeline, works, lr)
            totals = self.pipeline.train(works, self._last_count.reciprocal())
        else:
            totals = self._one_after_another(microbatches, lr)
        if self.in_backward is None:
            rest, live = self._share(totals)
            self._sum_partial()
            norm = self.norm() * rest
            self.optimizer.step(lr, rest * clip_factor(norm, self.clip), live)
            self.parallel.flat.updated()
            self.parallel.flat.free_gradients()
        else:
            rest, live = self._rest(totals)
            norm = self.in_backward.norm() * rest
        if self.average is not None:
            self.average.step(live)
        self.loads.end_step(live)
        self._last_count = torch.where(live, totals[1], self._last_count)
        self.num_steps += 1
        return StepResult(later(torch.cat([totals, norm[None]])))

    def _share(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Sums (loss, number of targets) over the ranks, in place: what is left to multiply gradients by, and whether
        there was a target."""
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        return self._rest(totals)

    def _rest(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        return self._last_count / totals[1].clamp(min=1.0), totals[1] > 0

    def _sum_partial(self) -> None:
        for axis, held in self._partial:
            sum_held(axis, held)

    def _counted(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        """One by one, as they may be made one by one; raises where there are more or fewer than a step has."""
        given = 0
        for microbatch in microbatches:
            given += 1
            if given > self.layout.accumulate:
                break
            yield microbatch
        if given != self.layout.accumulate:
            found = f"{given} given" if given < self.layout.accumulate else "more are given"
            raise ValueError(
                f"a step has accumulate={self.layout.accumulate} microbatches on every rank ({found}); "
                "give so many, or change accumulate in the layout"
            )

    def _window(self, pipeline: Pipeline, works: list[Work], lr: float) -> StepResult:
        """A step of an asynchronous schedule: updates happen inside it, each with the norm of its own stage.

        The ranks tell each other the loss, but no rank waits for it: the first stages go on to the next step while the
        last is at this one.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.parallel.options.device)

        def update(scale: float, lr: float) -> None:
            self._sum_partial()
            norm = self.norm() * scale
            squares.copy_(norm.square())
            self.optimizer.step(lr, scale * clip_factor(norm, self.clip), torch.ones_like(norm, dtype=torch.bool))
            self.parallel.flat.free_gradients()

        totals = pipeline.window(works, update, lr)
        last = squares if self.parallel.tokens.index == 0 else torch.zeros_like(squares)
        together = torch.cat([totals, last[None]])
        telling = self.parallel.axes[self.loss_axis].start_all_reduce(together)
        self.loads.end_window()

        def ask() -> Sequence[float]:
            telling.wait()
            loss_sum, count, square = together.tolist()
            return loss_sum, count, square**0.5

        self.num_steps += 1
        return StepResult(ask)

    def drain(self) -> None:
        """Ends what is under way, in an asynchronous schedule or on the host: every microbatch has made its update."""
        if self.pipeline is not None:
            self.pipeline.drain()
        for unit in self.parallel.flat.units:
            if unit.host is not None:
                unit.host.wait()

    def close(self) -> None:
        """Ends what works beside it: threads, and files that hold its states. It can do nothing after this."""
        self.parallel.away.close()

    def _one_after_another(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        """(sum of losses, number of valid targets) of this rank; of all where updates run in backward."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        flat = self.parallel.flat
        for index, microbatch in enumerate(microbatches):
            last = index == self.layout.accumulate - 1
            flat.begin(first=index == 0, last=last)
            with explained():
                with self.parallel.saving():
                    total, count = loss_pair(self.model(**self.prepared(microbatch)))
                totals[0] += total.detach()
                totals[1] += count
                if last and self.in_backward is not None:
                    self.in_backward.begin(lr, *self._share(totals))
                if total.requires_grad:
                    total.backward(self._last_count.reciprocal().to(total.dtype).expand_as(total))  # see the first note
            flat.end()
        return totals

    def prepared(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The microbatch on the device, floats in the compute type; dropout is told which samples these are."""
        self.parallel.stream.samples = self._samples(microbatch)
        return self._on_device(microbatch)

    def _works(self, microbatches: Iterable[Microbatch]) -> list[Work]:
        cutting, found = self.parallel.context, []
        for microbatch in microbatches:
            inputs = self._on_device(microbatch)
            found.append(Work(inputs, self._samples(microbatch), length=cutting.length if cutting else 0))
        return found

    def _samples(self, microbatch: Microbatch) -> Tensor:
        return sent(microbatch.samples, self.parallel.options.device)

    def _on_device(self, microbatch: Microbatch) -> dict[str, Tensor]:
        options, cutting = self.parallel.options, self.parallel.context
        whole = {
            key: sent(value, options.device, options.compute if value.is_floating_point() else None)
            for key, value in microbatch.inputs.items()
        }
        return whole if cutting is None else cutting.cut(whole)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Microbatch]) -> float | None:
        """The mean loss over this and all other ranks' microbatches, without dropout; none where there is no target.

        Of the average of the weights, where one is kept.
        """
        was_training = self.model.training
        self.model.eval()
        with self._kernels(), self.averaged():
            totals = self._totals(microbatches)
        self.model.train(was_training)
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        loss_sum, count = totals.tolist()
        return float(loss_sum / count) if count else None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the average of its weights, where one is kept (optimizer.ema)."""
        if self.average is None or self._averaged:
            yield
            return
        self._swap(self.average)
        try:
            yield
        finally:
            self._swap(self.average)

    def _swap(self, average: Average) -> None:
        self._averaged = not self._averaged
        average.swap()
        self.parallel.flat.updated()

    def _totals(self, microbatches: Iterable[Microbatch]) -> Tensor:
        """(sum of losses, number of valid targets) of this rank's microbatches."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(self._works(microbatches))
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        for microbatch in microbatches:
            total, count = loss_pair(self.model(**self.prepared(microbatch)))
            totals[0] += total
            totals[1] += count
        return totals

    @torch.no_grad()
    def logits(self, tokens: Tensor, size: int) -> Tensor:
        """float64 [size]: what a language model says comes after the last token of the only row, on every rank."""
        model: Any = self.model
        with self._kernels():
            if self.pipeline is not None:
                return self.pipeline.logits({"tokens": tokens}, size)
            if self.parallel.context is not None:
                found = self.parallel.context.last(
                    model.logits(**self.parallel.context.cut({"tokens": tokens}, counted=False))
                )
            else:
                found = model.logits(tokens)[:, -1]
        return found[0, :size].double()

    def outside_gathered(self) -> AbstractContextManager[None]:
        """Around calls of `logits`, which is not `forward`: only the layers gather by themselves."""
        return self.parallel.flat.outside_gathered() if self.pipeline is None else nullcontext()

    # -- cost ---------------------------------------------------------------------------------------------------------

    def collectives(self, traffic: Traffic | None = None) -> list[Collective]:
        """What one step issues on this rank, from the strategies' own cost functions.

        `traffic` describes the model where tp, cp or pp is more than 1. The first step of a pipeline also sends shapes.
        """
        return issued.collectives(self, traffic)

    def crossing(self) -> dict[str, int]:
        """Bytes that one step moves between this rank's device and its host, without activations."""
        return issued.crossing(self)
