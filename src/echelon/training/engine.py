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
from echelon.faults.flight_recorder import FlightRecorder
from echelon.kernels import dispatch
from echelon.layout import Layout, check_layout
from echelon.layout.collective import Collective
from echelon.memory.checkpointing.checkpoint_wrapper import recompute_context
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.models.lm_head import check_loss_output
from echelon.models.model_config import ModelConfig
from echelon.optim import cost, optimizer_groups
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.param_shards import build_flat_segments
from echelon.optim.rules.ema import WeightEMA
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.apply import apply
from echelon.parallel.comm.mesh_axis import world_size
from echelon.parallel.dp.sharded_model import explain_freed_params
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.tp.cost import TransformerSizes
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.pipeline.execution.stage_assignment import assign_stages
from echelon.precision import accumulation_dtype
from echelon.precision.loss_scale import LossScale, LossScaler
from echelon.training import step_comm_volume
from echelon.training.batch_sharding import Batch, BatchSharder, Microbatch
from echelon.training.engine_options import validate_engine
from echelon.training.generate import next_token_logits
from echelon.training.grad_norm import GradientNorm, all_reduce_pieces, clip_factor, partial_gradients
from echelon.training.guard.nan_debug import NonfiniteLocator, NonfiniteReport
from echelon.training.logging.expert_load_counter import ExpertLoadCounter, experts_per_moe_layer
from echelon.training.step_result import StepResult, start_host_copy
from echelon.training.update_strategies import OptimizerInBackward


def model_config_of(model: nn.Module) -> ModelConfig | None:
    """The shape of a model of ours; a user's module has none that we know."""
    config = getattr(model, "config", None)
    return config if isinstance(config, ModelConfig) else None


class Engine:
    """A one-device model, laid out, with its optimizer. `step` takes the global batch; every rank picks its rows."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout | str = "",
        optimizer: UpdateRule | None = None,
        *,
        clip: float = 0.0,
        options: ParallelOptions | None = None,
        loss_scale: LossScale | None = None,
        recorder: FlightRecorder | None = None,
    ):
        layout = check_layout(str(layout), world=world_size(), model=model_config_of(model))
        if layout.plan_only:
            raise ValueError("; ".join(layout.plan_only))
        self.rule: UpdateRule = optimizer or OptimizerConfig()
        self.clip = clip
        options, loss_scale = options or ParallelOptions(), loss_scale or LossScale()
        validate_engine(self.rule, layout, clip=clip, master=options.master_dtype, loss_scale=loss_scale)
        options = replace(
            options, optimizer_bytes_per_element=cost.state_bytes_per_element(self.rule, options.master_dtype.itemsize)
        )
        self.param_names = tuple(name for name, _ in model.named_parameters())
        """of all parameters of the model, wherever they are"""
        optimizer_groups.check_patterns(self.rule, self.param_names)
        self.nonfinite_locator = NonfiniteLocator(model)
        mixtures = experts_per_moe_layer(model, layout)
        stages = assign_stages(model, layout, options) if layout.pp > 1 else None
        self.parallel = apply(model, layout, options, stages.modules if stages else None, recorder)
        self.pipeline = Pipeline(stages, self.parallel) if stages else None
        self.recorder = self.parallel.axes.recorder
        self.model, self.layout = self.parallel.model, layout
        self._batch_sharder = BatchSharder(self.parallel)
        self.norm = GradientNorm(self.parallel)
        self._partial_gradients = partial_gradients(self.parallel)
        self.optimizer_in_backward: OptimizerInBackward | None = None
        if self.rule.in_backward:
            self.optimizer_in_backward = OptimizerInBackward(
                self.parallel, self.rule, self.norm, self._partial_gradients
            )
        self.optimizer: ShardedOptimizer = (
            self.optimizer_in_backward.optimizer
            if self.optimizer_in_backward
            else build_optimizer(self.parallel, self.rule)
        )
        self.ema = WeightEMA(build_flat_segments(self.parallel, self.rule), self.rule.ema) if self.rule.ema else None
        self._has_ema_weights = False
        self.expert_loads = ExpertLoadCounter(self.parallel, mixtures)
        self.num_steps = 0
        self.before_update: Callable[[], None] = lambda: None
        """called before weights and states change: whoever copies them has them when it returns"""
        self.replay_check: Callable[[list[Microbatch], Callable[[Sequence[Microbatch]], Tensor]], Tensor] | None = None
        """computes steps in place of `_computed`, which it is given, perhaps several times (replay.py)"""
        self.last_num_targets = torch.ones((), dtype=torch.float64, device=self.parallel.options.device)
        self.loss_scaler = LossScaler(loss_scale, self.parallel.options.device)

    @property
    def loss_axis(self) -> str:
        """The axis over which sums of losses and numbers of targets are added up."""
        tokens = self.parallel.token_axis.name
        return f"pp*{tokens}" if self.layout.pp > 1 else tokens

    @property
    def updates_after_backward(self) -> bool:
        """Weights and states change after backward, in one place, and nowhere else."""
        asynchronous = self.pipeline is not None and self.pipeline.asynchronous
        away = any(unit.offloaded is not None for unit in self.parallel.sharded_model.param_groups)
        return self.optimizer_in_backward is None and not asynchronous and not away

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, lr: float | None = None) -> StepResult:
        """Trains on the global batch, any multiple of dp x accumulate rows, which every rank is given alike."""
        return self.step_microbatches(self.microbatches(batch), lr=lr)

    def microbatches(self, batch: Batch, step: int | None = None) -> Iterator[Microbatch]:
        """This rank's part of the global batch, for the next step or another one."""
        return self._batch_sharder.microbatches(batch, self.num_steps if step is None else step)

    def row_ranges(self, batch: int) -> Iterator[range]:
        """This rank's rows of a global batch, microbatch by microbatch."""
        return self._batch_sharder.row_ranges(batch)

    def prepare(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The microbatch on the device, floats in the compute type; dropout is told which samples these are."""
        return self._batch_sharder.prepare(microbatch)

    def step_microbatches(self, microbatches: Iterable[Microbatch], *, lr: float | None = None) -> StepResult:
        """Trains on this rank's own `accumulate` microbatches."""
        if isinstance(self.parallel.checkpointing, MemoryBudget) and self.parallel.checkpointing.is_undecided:
            microbatches = self._peek_first(iter(microbatches), self.rehearse_memory_budget)
        if self._estimates_targets:
            microbatches = self._peek_first(iter(microbatches), self._estimate_num_targets)
        with self._kernels():
            return self._run_step(self._batch_sharder.check_count(microbatches), self.rule.lr if lr is None else lr)

    def _peek_first(self, microbatches: Iterator[Microbatch], to: Callable[[Microbatch], None]) -> Iterator[Microbatch]:
        first = list(islice(microbatches, 1))
        for microbatch in first:
            to(microbatch)
        return chain(first, microbatches)

    @property
    def _estimates_targets(self) -> bool:
        """The first step starts from a guess of its targets: scaled, or in float16, the gradient of a sum over all of
        them would overflow."""
        is_half = self.parallel.options.compute_dtype == torch.float16
        return self.num_steps == 0 and (is_half or not self.loss_scaler.recipe.is_one)

    def _estimate_num_targets(self, microbatch: Microbatch) -> None:
        self.last_num_targets.fill_(self._batch_sharder.estimate_num_targets(microbatch))

    @torch.no_grad()
    def rehearse_memory_budget(self, microbatch: Microbatch) -> None:
        """Decides what each layer keeps (recompute=budget) by a forward pass that changes nothing; all ranks do."""
        found, parallel = self.parallel.checkpointing, self.parallel
        if isinstance(found, MemoryBudget):
            counted = recompute_context(self.model, parallel.rng_stream, self._batch_sharder.sample_indices(microbatch))
            with self._kernels(), counted, found.rehearsal(parallel.options.device):
                self._forward_totals([microbatch])

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        with (
            dispatch.plain_torch() if self.parallel.options.kernels == "plain" else nullcontext(),
            accumulation_dtype.fp32_accumulation(),
        ):
            yield

    def _run_step(self, microbatches: Iterable[Microbatch], lr: float) -> StepResult:
        if self.pipeline is not None and self.pipeline.asynchronous:
            return self._async_step(self.pipeline, self._batch_sharder.pipeline_microbatches(microbatches), lr)
        if self.replay_check is None:
            totals = self._forward_backward(microbatches, lr)
        else:
            totals = self.replay_check(list(microbatches), lambda again: self._forward_backward(again, lr))
        self.recorder.enter_phase("update")
        if self.optimizer_in_backward is None:
            rest, live = self._reduce_totals(totals)
            self._reduce_partial_gradients()
            norm, norms = self.norm.norm_and_slice_norms()
        else:
            rest, live = self._remaining_scale(totals)
            norm, norms = self.optimizer_in_backward.grad_norm()
        norm = norm * rest
        finite = torch.isfinite(norm) & torch.isfinite(totals[0])
        if self.optimizer_in_backward is None:
            self.before_update()
            self.optimizer.step(lr, rest * clip_factor(norm, self.clip), live & finite)
            self.parallel.sharded_model.after_update()
            self.parallel.sharded_model.free_grads()
        if self.ema is not None:
            self.ema.step(live & finite)
        self.expert_loads.end_step(live & finite)
        self.last_num_targets = torch.where(live, totals[1], self.last_num_targets)
        scale = self.loss_scaler.scale
        self.loss_scaler.update(finite, live & finite)
        self.num_steps += 1
        told = torch.cat([totals, torch.stack([norm, scale, self.loss_scaler.scale])])
        return StepResult(start_host_copy(told), start_host_copy(norms))

    def locate_nonfinite(self, result: StepResult) -> NonfiniteReport | None:
        """What was not finite in a step, if anything was. All ranks must ask, in the same order."""
        if result.finite:
            return None
        return self.nonfinite_locator.locate(
            self.parallel, self.norm.slices, result.read_norms(), loss_is_nonfinite=not math.isfinite(result.loss)
        )

    @property
    def _backward_seed(self) -> Tensor:
        """What backward starts from: see the first note."""
        return self.loss_scaler.scale / self.last_num_targets

    def _reduce_totals(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Sums (loss, targets) over the ranks, in place: what is left to multiply gradients by, and if any was."""
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        return self._remaining_scale(totals)

    def _remaining_scale(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        return self.last_num_targets / (totals[1].clamp(min=1.0) * self.loss_scaler.scale), totals[1] > 0

    def _reduce_partial_gradients(self) -> None:
        for axis, held in self._partial_gradients:
            all_reduce_pieces(axis, held)

    def _async_step(self, pipeline: Pipeline, works: list[MicrobatchInputs], lr: float) -> StepResult:
        """A step of an asynchronous schedule: updates happen inside it, each with the norm of its own stage.

        The ranks tell each other the loss, but no rank waits for it: the first stages go on to the next step while the
        last is at this one.
        """
        device = self.parallel.options.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.zeros(len(self.norm.slices), dtype=torch.float64, device=device)
        bad = torch.zeros_like(squares)

        def update(scale: float, lr: float) -> None:
            self._reduce_partial_gradients()
            norm, each = self.norm.norm_and_slice_norms()
            norms.add_(each)
            norm = norm * scale
            squares.copy_(norm.square())
            bad.add_(norm * 0.0)  # not a number from the first update on that is left out
            self.optimizer.step(lr, scale * clip_factor(norm, self.clip), torch.isfinite(norm))
            self.parallel.sharded_model.free_grads()

        scale = self.loss_scaler.recipe.start
        if self._estimates_targets:
            pipeline.set_loss_scale(scale, float(self.last_num_targets))
        totals = pipeline.train_window(works, update, lr)
        last = squares + bad if self.parallel.token_axis.index == 0 else bad
        together = torch.cat([totals, last[None]])
        telling = self.parallel.axes[self.loss_axis].start_all_reduce(together)
        self.expert_loads.end_window()

        def ask() -> Sequence[float]:
            telling.wait()
            loss_sum, count, square = together.tolist()
            return loss_sum, count, square**0.5, scale, scale

        self.num_steps += 1
        return StepResult(ask, start_host_copy(norms))

    def drain(self) -> None:
        """Ends what is under way, in an asynchronous schedule or on the host: every microbatch has made its update."""
        if self.pipeline is not None:
            self.pipeline.drain()
        for unit in self.parallel.sharded_model.param_groups:
            if unit.offloaded is not None:
                unit.offloaded.wait()

    def close(self) -> None:
        """Ends what works beside it: threads, and files that hold its states. It can do nothing after this."""
        self.parallel.offload.close()

    def _forward_backward(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        """Forward and backward. (sum of losses, number of valid targets) of this rank; gradients are reduced."""
        if self.pipeline is not None:
            return self.pipeline.train(self._batch_sharder.pipeline_microbatches(microbatches), self._backward_seed)
        return self._accumulate_microbatches(microbatches, lr)

    def _accumulate_microbatches(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        """(sum of losses, number of valid targets) of this rank; of all where updates run in backward."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        flat = self.parallel.sharded_model
        for index, microbatch in enumerate(microbatches):
            last = index == self.layout.accumulate - 1
            flat.begin_microbatch(first=index == 0, last=last)
            with explain_freed_params():
                with self.parallel.saved_tensor_context():
                    total, count = check_loss_output(self.model(**self.prepare(microbatch)))
                totals[0] += total.detach()
                totals[1] += count
                if last and self.optimizer_in_backward is not None:
                    self.optimizer_in_backward.begin(lr, *self._reduce_totals(totals))
                self.recorder.enter_phase("backward")
                if total.requires_grad:
                    total.backward(self._backward_seed.to(total.dtype).expand_as(total))
            flat.end_microbatch()
        return totals

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Microbatch]) -> float | None:
        """The mean loss over all ranks' microbatches, without dropout, of the average of the weights where one is kept;
        none where there is no target."""
        was_training = self.model.training
        self.model.eval()
        with self._kernels(), self.ema_weights():
            totals = self._forward_totals(microbatches)
        self.model.train(was_training)
        self.parallel.axes[self.loss_axis].all_reduce(totals)
        loss_sum, count = totals.tolist()
        return float(loss_sum / count) if count else None

    @torch.no_grad()
    def forward_only(self, microbatches: Iterable[Microbatch]) -> None:
        """As a step begins: for whoever watches the model."""
        with self._kernels():
            self._forward_totals(microbatches)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The model has the average of its weights, where one is kept (optimizer.ema)."""
        if self.ema is None or self._has_ema_weights:
            yield
            return
        self._swap_ema(self.ema)
        try:
            yield
        finally:
            self._swap_ema(self.ema)

    def _swap_ema(self, average: WeightEMA) -> None:
        self._has_ema_weights = not self._has_ema_weights
        self.before_update()
        average.swap()
        self.parallel.sharded_model.after_update()

    def _forward_totals(self, microbatches: Iterable[Microbatch]) -> Tensor:
        """(sum of losses, number of valid targets) of this rank's microbatches."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(self._batch_sharder.pipeline_microbatches(microbatches))
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        for microbatch in microbatches:
            total, count = check_loss_output(self.model(**self.prepare(microbatch)))
            totals[0] += total
            totals[1] += count
        return totals

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor, vocab_size: int) -> Tensor:
        """float64 [size]: what a language model says comes after the last token of the only row, on every rank."""
        with self._kernels():
            return next_token_logits(self, tokens, vocab_size)

    def outside_gathered(self) -> AbstractContextManager[None]:
        """Around calls of `logits`, which is not `forward`: only the layers gather by themselves."""
        return self.parallel.sharded_model.non_layer_params_unsharded() if self.pipeline is None else nullcontext()

    # -- cost ---------------------------------------------------------------------------------------------------------

    def collectives(self, traffic: TransformerSizes | None = None) -> list[Collective]:
        """What one step issues on this rank, from the strategies' own cost functions.

        `traffic` describes the model where tp, cp or pp is more than 1. The first step of a pipeline also sends shapes.
        """
        return step_comm_volume.step_collectives(self, traffic)

    def host_transfer_bytes(self) -> dict[str, int]:
        """Bytes that one step moves between this rank's device and its host, without activations."""
        return step_comm_volume.host_transfer_bytes(self)
