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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from echelon.kernels import choice
from echelon.layout import Layout, check
from echelon.layout.cost import Collective
from echelon.layout.placement import Piece
from echelon.models.head import loss_pair
from echelon.models.sizes import ModelConfig
from echelon.optim import Rule, moment_bytes, num_moments, sharded
from echelon.parallel.apply import Options, Parallel, apply
from echelon.parallel.axis import Axis, sum_together, world_size
from echelon.parallel.flat import explained
from echelon.parallel.flat_unit import FlatUnit
from echelon.parallel.tensor import Traffic
from echelon.pipeline.pipeline import Pipeline
from echelon.pipeline.runtime import Work
from echelon.train import issued
from echelon.train.later import later, sent
from echelon.train.loads import Loads, mixtures_of
from echelon.train.norm import GradientNorm, clip_factor
from echelon.train.sections import OptimizerConfig

Batch = Mapping[str, Tensor]
"""the model's keyword arguments; the first dimension of each is samples"""


class StepResult:
    """What a step did, equal on every rank. Reading it may wait for ranks that are not through with the step yet."""

    def __init__(self, ask: Callable[[], Sequence[float]]):
        self._ask = ask

    @classmethod
    def of(cls, loss_sum: float, count: float, norm: float) -> StepResult:
        """What is known already."""
        return cls(lambda: (loss_sum, count, norm))

    def __reduce__(self) -> tuple[Any, tuple[float, float, float]]:
        """Between processes what is told travels, not the asking."""
        return StepResult.of, self._told

    @cached_property
    def _told(self) -> tuple[float, float, float]:
        """(sum of losses, number of valid targets, norm)"""
        loss_sum, count, norm = self._ask()
        return loss_sum, count, norm

    def wait(self) -> None:
        """Until the step is through."""
        _ = self._told

    @property
    def loss(self) -> float:
        """mean over all valid targets of the step; 0 where there is none"""
        return self._told[0] / max(self._told[1], 1.0)

    @property
    def count(self) -> int:
        """valid targets of the step"""
        return int(self._told[1])

    @property
    def norm(self) -> float:
        """of the mean loss's gradient, before clipping"""
        return self._told[2]

    @property
    def skipped(self) -> bool:
        """no valid target: nothing was updated"""
        return self.count == 0


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
        options = options or Options()
        options = replace(options, state_bytes=num_moments(self.rule) * moment_bytes(self.rule, options.master))
        self.names = tuple(name for name, _ in model.named_parameters())
        """of all parameters of the model, wherever they are"""
        mixtures = mixtures_of(model, layout)
        self.pipeline: Pipeline | None = None
        if layout.pp > 1:
            self.pipeline = Pipeline(model, layout, options)
        self.parallel: Parallel = self.pipeline.parallel if self.pipeline else apply(model, layout, options)
        self.model, self.layout = self.parallel.model, layout
        self.optimizer = sharded(self.parallel.flat, self.rule)
        self.norm = GradientNorm(self.parallel)
        self.loads = Loads(self.parallel, mixtures)
        self.num_steps = 0
        self._last_count = torch.ones((), dtype=torch.float64, device=self.parallel.options.device)
        self._partial = partial_gradients(self.parallel)

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
        with self._kernels():
            return self._run(self._counted(microbatches), self.rule.lr if lr is None else lr)

    def _kernels(self) -> AbstractContextManager[None]:
        return choice.plain() if self.parallel.options.kernels == "plain" else nullcontext()

    def _run(self, microbatches: Iterable[Microbatch], lr: float) -> StepResult:
        if self.pipeline is not None:
            works = self._works(microbatches)
            if self.pipeline.asynchronous:
                return self._window(self.pipeline, works, lr)
            totals = self.pipeline.train(works, self._last_count.reciprocal())
        else:
            totals = self._one_after_another(microbatches)
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        self._sum_partial()
        count = totals[1]
        rest = self._last_count / count.clamp(min=1.0)
        norm, live = self.norm() * rest, count > 0
        self.optimizer.step(lr, rest * clip_factor(norm, self.clip), live)
        self.parallel.flat.updated()
        self.parallel.flat.free_gradients()
        self.loads.end_step(live)
        self._last_count = torch.where(live, count, self._last_count)
        self.num_steps += 1
        return StepResult(later(torch.cat([totals, norm[None]])))

    def _sum_partial(self) -> None:
        for axis, held in self._partial:
            found = [self.parallel.flat.view(unit.grad, piece) for unit, piece in held]
            here = [gradient.to(self.parallel.options.device) for gradient in found]  # some may be on the host
            sum_together(axis, here)
            for gradient, summed in zip(found, here, strict=True):
                if gradient is not summed:
                    gradient.copy_(summed)

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

    def _one_after_another(self, microbatches: Iterable[Microbatch]) -> Tensor:
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        for index, microbatch in enumerate(microbatches):
            total, count = self._forward_backward(
                microbatch, first=index == 0, last=index == self.layout.accumulate - 1
            )
            totals[0] += total
            totals[1] += count
        return totals

    def _forward_backward(self, microbatch: Microbatch, *, first: bool, last: bool) -> tuple[Tensor, Tensor]:
        flat = self.parallel.flat
        flat.begin(first=first, last=last)
        with explained():
            total, count = loss_pair(self.model(**self.prepared(microbatch)))
            if total.requires_grad:
                total.backward(self._last_count.reciprocal().to(total.dtype).expand_as(total))  # see the first note
        flat.end()
        return total.detach(), count

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
        """The mean loss over this and all other ranks' microbatches, without dropout; none where there is no target."""
        was_training = self.model.training
        self.model.eval()
        with self._kernels():
            totals = self._totals(microbatches)
        self.model.train(was_training)
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        loss_sum, count = totals.tolist()
        return float(loss_sum / count) if count else None

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


def partial_gradients(parallel: Parallel) -> list[tuple[Axis, list[tuple[FlatUnit, Piece]]]]:
    """The gradients of which each rank of an axis has only a part: to be summed over it once a step, when reduced."""
    found: dict[str, list[tuple[FlatUnit, Piece]]] = {}
    for unit, piece in parallel.flat.pieces():
        for name in piece.entry.sum_over if piece.start < piece.stop else ():
            found.setdefault(name, []).append((unit, piece))
    return [(parallel.axes[name], held) for name, held in sorted(found.items())]
