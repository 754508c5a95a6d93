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

[Note: a step that is left out]

A step updates nothing, neither weights nor moments nor their count of steps, where it has no target, or where the loss
or the norm is not finite. All ranks share both, so all leave it out together. `Engine.not_finite` tells whose gradient
it was (norm.py). Stages of an asynchronous schedule have norms of their own, and leave an update out each for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor, nn

from echelon.config.sections import OptimizerConfig
from echelon.faults.flight_recorder import here
from echelon.kernels import dispatch
from echelon.layout import Layout, check
from echelon.layout.collective import Collective
from echelon.memory.checkpointing.checkpoint_wrapper import repeated
from echelon.memory.checkpointing.memory_budget import Budgeted
from echelon.models.lm_head import loss_pair
from echelon.models.model_config import ModelConfig
from echelon.optim import cost, optimizer_groups
from echelon.optim.optimizer_factory import sharded
from echelon.optim.optimizer_protocol import Update
from echelon.optim.param_shards import runs_of
from echelon.optim.rules.ema import Average
from echelon.optim.update_rule import Rule
from echelon.parallel.apply import Options, Parallel, apply
from echelon.parallel.comm.mesh_axis import world_size
from echelon.parallel.dp.sharded_model import explained
from echelon.parallel.tp.tensor_parallel import Traffic
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.pipeline.execution.runtime import Work
from echelon.precision import accumulation_dtype
from echelon.precision.loss_scale import LossScale, Scaling
from echelon.training import next_token, step_comm_volume
from echelon.training.async_copy import later
from echelon.training.batch_sharding import Batch, Feed, Microbatch
from echelon.training.grad_norm import GradientNorm, clip_factor
from echelon.training.grad_sync import partial_gradients, sum_held
from echelon.training.guard.nan_debug import Blame, NotFinite
from echelon.training.logging.expert_load_counter import Loads, mixtures_of
from echelon.training.optimizer_in_backward import InBackward
from echelon.training.step_result import StepResult
from echelon.training.validate_engine import refuse


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
        loss_scale: LossScale | None = None,
    ):
        layout = check(str(layout), world=world_size(), model=shape_of(model))
        if layout.plan_only:
            raise ValueError("; ".join(layout.plan_only))
        self.rule: Rule = optimizer or OptimizerConfig()
        self.clip = clip
        options, loss_scale = options or Options(), loss_scale or LossScale()
        refuse(self.rule, layout, clip=clip, master=options.master, loss_scale=loss_scale)
        options = replace(options, state_bytes=cost.element_bytes(self.rule, options.master.itemsize))
        self.names = tuple(name for name, _ in model.named_parameters())
        """of all parameters of the model, wherever they are"""
        optimizer_groups.check(self.rule, self.names)
        self.blame = Blame(model)
        mixtures = mixtures_of(model, layout)
        self.pipeline: Pipeline | None = None
        if layout.pp > 1:
            self.pipeline = Pipeline(model, layout, options)
        self.parallel: Parallel = self.pipeline.parallel if self.pipeline else apply(model, layout, options)
        self.model, self.layout = self.parallel.model, layout
        self._feed = Feed(self.parallel)
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
        self.settle: Callable[[], None] = lambda: None
        """called before weights and states change: whoever copies them has them when it returns"""
        self.replay: Callable[[list[Microbatch], Callable[[Sequence[Microbatch]], Tensor]], Tensor] | None = None
        """computes steps in place of `_computed`, which it is given, perhaps several times (replay.py)"""
        self.last_count = torch.ones((), dtype=torch.float64, device=self.parallel.options.device)
        self.scaling = Scaling(loss_scale, self.parallel.options.device)

    @property
    def loss_axis(self) -> str:
        """The axis over which sums of losses and numbers of targets are added up."""
        tokens = self.parallel.tokens.name
        return f"pp*{tokens}" if self.layout.pp > 1 else tokens

    @property
    def updates_last(self) -> bool:
        """Weights and states change after backward, in one place, and nowhere else."""
        asynchronous = self.pipeline is not None and self.pipeline.asynchronous
        away = any(unit.host is not None for unit in self.parallel.flat.units)
        return self.in_backward is None and not asynchronous and not away

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, lr: float | None = None) -> StepResult:
        """Trains on the global batch, any multiple of dp x accumulate rows, which every rank is given alike."""
        return self.run(self.microbatches(batch), lr=lr)

    def microbatches(self, batch: Batch, step: int | None = None) -> Iterator[Microbatch]:
        """This rank's part of the global batch, for the next step or another one."""
        return self._feed.microbatches(batch, self.num_steps if step is None else step)

    def rows(self, batch: int) -> Iterator[range]:
        """This rank's rows of a global batch, microbatch by microbatch."""
        return self._feed.rows(batch)

    def prepared(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The microbatch on the device, floats in the compute type; dropout is told which samples these are."""
        return self._feed.prepared(microbatch)

    def run(self, microbatches: Iterable[Microbatch], *, lr: float | None = None) -> StepResult:
        """Trains on this rank's own `accumulate` microbatches."""
        if isinstance(self.parallel.recomputed, Budgeted) and self.parallel.recomputed.undecided:
            microbatches = self._shown(iter(microbatches), self.rehearse)
        if self._guesses:
            microbatches = self._shown(iter(microbatches), self._guess_count)
        with self._kernels():
            return self._run(self._feed.counted(microbatches), self.rule.lr if lr is None else lr)

    def _shown(self, microbatches: Iterator[Microbatch], to: Callable[[Microbatch], None]) -> Iterator[Microbatch]:
        first = list(islice(microbatches, 1))
        for microbatch in first:
            to(microbatch)
        return chain(first, microbatches)

    @property
    def _guesses(self) -> bool:
        """The first step starts from a guess of its targets: scaled, or in float16, the gradient of a sum over all of
        them would overflow."""
        is_half = self.parallel.options.compute == torch.float16
        return self.num_steps == 0 and (is_half or not self.scaling.recipe.is_one)

    def _guess_count(self, microbatch: Microbatch) -> None:
        self.last_count.fill_(self._feed.likely_count(microbatch))

    @torch.no_grad()
    def rehearse(self, microbatch: Microbatch) -> None:
        """Decides what each layer keeps (recompute=budget) by a forward pass that changes nothing; all ranks do."""
        found, parallel = self.parallel.recomputed, self.parallel
        if isinstance(found, Budgeted):
            counted = repeated(self.model, parallel.stream, self._feed.samples(microbatch))
            with self._kernels(), counted, found.rehearsal(parallel.options.device):
                self._totals([microbatch])

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        with (
            dispatch.plain() if self.parallel.options.kernels == "plain" else nullcontext(),
            accumulation_dtype.in_float32(),
        ):
            yield

    def _run(self, microbatches: Iterable[Microbatch], lr: float) -> StepResult:
        if self.pipeline is not None and self.pipeline.asynchronous:
            return self._window(self.pipeline, self._feed.works(microbatches), lr)
        if self.replay is None:
            totals = self._computed(microbatches, lr)
        else:
            totals = self.replay(list(microbatches), lambda again: self._computed(again, lr))
        here.enter("update")
        if self.in_backward is None:
            rest, live = self._share(totals)
            self._sum_partial()
            norm, norms = self.norm.measured()
        else:
            rest, live = self._rest(totals)
            norm, norms = self.in_backward.norm()
        norm = norm * rest
        finite = torch.isfinite(norm) & torch.isfinite(totals[0])
        if self.in_backward is None:
            self.settle()
            self.optimizer.step(lr, rest * clip_factor(norm, self.clip), live & finite)
            self.parallel.flat.updated()
            self.parallel.flat.free_gradients()
        if self.average is not None:
            self.average.step(live & finite)
        self.loads.end_step(live & finite)
        self.last_count = torch.where(live, totals[1], self.last_count)
        scale = self.scaling.value
        self.scaling.after(finite, live & finite)
        self.num_steps += 1
        told = torch.cat([totals, torch.stack([norm, scale, self.scaling.value])])
        return StepResult(later(told), later(norms))

    def not_finite(self, result: StepResult) -> NotFinite | None:
        """What was not finite in a step, if anything was. All ranks must ask, in the same order."""
        if result.finite:
            return None
        return self.blame.find(self.parallel, self.norm.parts, result.norms(), loss=not math.isfinite(result.loss))

    @property
    def _seed(self) -> Tensor:
        """What backward starts from: see the first note."""
        return self.scaling.value / self.last_count

    def _share(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Sums (loss, targets) over the ranks, in place: what is left to multiply gradients by, and if any was."""
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        return self._rest(totals)

    def _rest(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        return self.last_count / (totals[1].clamp(min=1.0) * self.scaling.value), totals[1] > 0

    def _sum_partial(self) -> None:
        for axis, held in self._partial:
            sum_held(axis, held)

    def _window(self, pipeline: Pipeline, works: list[Work], lr: float) -> StepResult:
        """A step of an asynchronous schedule: updates happen inside it, each with the norm of its own stage.

        The ranks tell each other the loss, but no rank waits for it: the first stages go on to the next step while the
        last is at this one.
        """
        device = self.parallel.options.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.zeros(len(self.norm.parts), dtype=torch.float64, device=device)
        bad = torch.zeros_like(squares)

        def update(scale: float, lr: float) -> None:
            self._sum_partial()
            norm, each = self.norm.measured()
            norms.add_(each)
            norm = norm * scale
            squares.copy_(norm.square())
            bad.add_(norm * 0.0)  # not a number from the first update on that is left out
            self.optimizer.step(lr, scale * clip_factor(norm, self.clip), torch.isfinite(norm))
            self.parallel.flat.free_gradients()

        scale = self.scaling.recipe.start
        if self._guesses:
            pipeline.start_from(scale, float(self.last_count))
        totals = pipeline.window(works, update, lr)
        last = squares + bad if self.parallel.tokens.index == 0 else bad
        together = torch.cat([totals, last[None]])
        telling = self.parallel.axes[self.loss_axis].start_all_reduce(together)
        self.loads.end_window()

        def ask() -> Sequence[float]:
            telling.wait()
            loss_sum, count, square = together.tolist()
            return loss_sum, count, square**0.5, scale, scale

        self.num_steps += 1
        return StepResult(ask, later(norms))

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

    def _computed(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        """Forward and backward. (sum of losses, number of valid targets) of this rank; gradients are reduced."""
        if self.pipeline is not None:
            return self.pipeline.train(self._feed.works(microbatches), self._seed)
        return self._one_after_another(microbatches, lr)

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
                here.enter("backward")
                if total.requires_grad:
                    total.backward(self._seed.to(total.dtype).expand_as(total))
            flat.end()
        return totals

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Microbatch]) -> float | None:
        """The mean loss over all ranks' microbatches, without dropout, of the average of the weights where one is kept;
        none where there is no target."""
        was_training = self.model.training
        self.model.eval()
        with self._kernels(), self.averaged():
            totals = self._totals(microbatches)
        self.model.train(was_training)
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        loss_sum, count = totals.tolist()
        return float(loss_sum / count) if count else None

    @torch.no_grad()
    def forward(self, microbatches: Iterable[Microbatch]) -> None:
        """As a step begins: for whoever watches the model."""
        with self._kernels():
            self._totals(microbatches)

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
        self.settle()
        average.swap()
        self.parallel.flat.updated()

    def _totals(self, microbatches: Iterable[Microbatch]) -> Tensor:
        """(sum of losses, number of valid targets) of this rank's microbatches."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(self._feed.works(microbatches))
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        for microbatch in microbatches:
            total, count = loss_pair(self.model(**self.prepared(microbatch)))
            totals[0] += total
            totals[1] += count
        return totals

    @torch.no_grad()
    def logits(self, tokens: Tensor, size: int) -> Tensor:
        """float64 [size]: what a language model says comes after the last token of the only row, on every rank."""
        with self._kernels():
            return next_token.logits(self, tokens, size)

    def outside_gathered(self) -> AbstractContextManager[None]:
        """Around calls of `logits`, which is not `forward`: only the layers gather by themselves."""
        return self.parallel.flat.outside_gathered() if self.pipeline is None else nullcontext()

    # -- cost ---------------------------------------------------------------------------------------------------------

    def collectives(self, traffic: Traffic | None = None) -> list[Collective]:
        """What one step issues on this rank, from the strategies' own cost functions.

        `traffic` describes the model where tp, cp or pp is more than 1. The first step of a pipeline also sends shapes.
        """
        return step_comm_volume.collectives(self, traffic)

    def crossing(self) -> dict[str, int]:
        """Bytes that one step moves between this rank's device and its host, without activations."""
        return step_comm_volume.crossing(self)
