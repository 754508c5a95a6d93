"""Strategies of a training step: when weights are updated, and what a first step must find out.

    UpdateAfterBackward     one update when every gradient is reduced: the default
    UpdateInBackward        one update per parameter group inside backward (optimizer.in_backward)
    AsynchronousStep        updates inside the schedule, each stage on its own (PipeDream, 2BW)
    MemoryBudgetRehearsal   a forward pass that decides what to recompute (recompute=budget)
    TargetEstimate          the number of targets that the first backward is scaled by (float16, loss scale)

[Note: update in backward]

    last microbatch    forward of all layers; the ranks all-reduce the number of targets
    backward           layer 3: gradients, reduction starts
                       layer 2: gradients, reduction starts;  layer 3: reduced, updated, gradients freed
                       layer 1: gradients, reduction starts;  layer 2: reduced, updated, gradients freed ...

The number of targets divides the gradients, so it is all-reduced before the last backward. The norm is complete only
after backward: it is logged but cannot clip, and a step with gradients that are not finite cannot be skipped, so it
ends the run. At any time the gradients of two parameter groups and of the root exist; with several microbatches
gradients accumulate, and all of them exist when the last backward begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.memory.checkpointing.checkpoint_wrapper import recompute_context
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.optimizer_protocol import CombinedOptimizer
from echelon.parallel.dp.param_group import ParamGroup
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.precision.loss_scale import DelayedLossScaler
from echelon.training.batch_sharding import Microbatch
from echelon.training.grad_norm import clip_factor
from echelon.training.step_result import StepResult, start_host_copy

if TYPE_CHECKING:
    from echelon.training.engine import Engine


class UpdateAfterBackward:
    """One update when every gradient of the step is reduced."""

    def __init__(self, engine: Engine):
        self._engine, self.optimizer = engine, build_optimizer(engine.parallel, engine.update_rule)

    def before_last_backward(self, totals: Tensor, lr: float) -> None:
        """Called with this rank's totals between the last forward and the last backward of a step."""

    def measure(self, totals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reduce `totals` in place; return (gradient scale, gradient norm before it, norms of this rank's slices)."""
        grad_scale = self._engine.normalizer.reduce(totals)
        self._engine.partial_gradients.all_reduce()
        return grad_scale, *self._engine.grad_norm.norm_and_slice_norms()

    def update(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        """Update the weights from gradients times `grad_scale`, where `do_update` is true."""
        sharded_model = self._engine.parallel.sharded_model
        self._engine.before_update()
        self.optimizer.step(lr, grad_scale, do_update)
        sharded_model.after_update()
        sharded_model.free_grads()


class UpdateInBackward:
    """One update per parameter group, as soon as its gradients are reduced: see the note."""

    def __init__(self, engine: Engine):
        parallel, device = engine.parallel, engine.parallel.options.device
        groups = parallel.sharded_model.trainable_groups
        self._optimizers = {group: build_optimizer(parallel, engine.update_rule, [group]) for group in groups}
        self._engine, self.optimizer = engine, CombinedOptimizer(list(self._optimizers.values()))
        parallel.sharded_model.on_grad_reduced = self._update_group
        for group in groups:
            group.grads.lazy = True
            group.free_grads()
        self._lr, self._grad_scale = 0.0, torch.ones((), dtype=torch.float64, device=device)
        self._has_targets = torch.ones((), dtype=torch.bool, device=device)
        self._slice_norms = torch.zeros(len(engine.grad_norm.slices), dtype=torch.float64, device=device)

    def before_last_backward(self, totals: Tensor, lr: float) -> None:
        self._lr, self._grad_scale, self._has_targets = lr, self._engine.normalizer.reduce(totals), totals[1] > 0
        self._slice_norms = torch.zeros_like(self._slice_norms)

    def measure(self, totals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm = self._engine.grad_norm.reduce_norm(self._slice_norms)
        return self._engine.normalizer.grad_scale(totals), norm, self._slice_norms

    def update(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        """Backward has updated every group."""

    def _update_group(self, group: ParamGroup) -> None:
        self._engine.partial_gradients.all_reduce(group)
        self._engine.grad_norm.add_group(group, self._slice_norms)
        self._optimizers[group].step(self._lr, self._grad_scale, self._has_targets)
        group.after_update()
        group.free_grads()


class AsynchronousStep:
    """A step of an asynchronous schedule: each stage updates inside it, clipped by its own gradient norm.

    The ranks all-reduce the loss, but no rank waits for it: the first stages begin the next step while the last stage
    is still in this one.
    """

    def __init__(self, engine: Engine, pipeline: Pipeline):
        self._engine, self._pipeline = engine, pipeline
        pipeline.async_runtime.loss_scaler = DelayedLossScaler(engine.normalizer.loss_scaler)

    def __call__(self, microbatches: Iterable[Microbatch], lr: float) -> StepResult:
        engine, device = self._engine, self._engine.parallel.options.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        slice_norms = torch.zeros(len(engine.grad_norm.slices), dtype=torch.float64, device=device)
        nonfinite = torch.zeros_like(square)

        def update(grad_scale: float, lr: float) -> Tensor:
            engine.partial_gradients.all_reduce()
            norm, each = engine.grad_norm.norm_and_slice_norms()
            slice_norms.add_(each)
            norm = norm * grad_scale
            square.copy_(norm.square())
            nonfinite.add_(norm * 0.0)  # NaN from the first skipped update on
            finite = torch.isfinite(norm)
            engine.optimizer.step(lr, grad_scale * clip_factor(norm, engine.clip), finite)
            engine.parallel.sharded_model.free_grads()
            return finite

        runtime = self._pipeline.async_runtime
        if TargetEstimate(engine).is_due():
            runtime.expect_targets(float(engine.normalizer.last_num_targets))
        inputs, scale = engine.batch_sharder.pipeline_microbatches(microbatches), runtime.loss_scaler.scale
        totals = runtime.train_window(inputs, update, lr)
        first_replica = engine.parallel.token_axis.index == 0
        counted = square + nonfinite if first_replica else nonfinite
        # The last stage knows the scale.
        scales = torch.tensor([scale, runtime.loss_scaler.scale], dtype=torch.float64, device=device)
        values = torch.cat([totals, counted[None], scales * float(first_replica and runtime.is_last)])
        reduction = engine.normalizer.axis.start_all_reduce(values)
        engine.expert_loads.end_window()

        def read() -> Sequence[float]:
            reduction.wait()
            loss_sum, num_targets, squared_norm, *loss_scales = values.tolist()
            return loss_sum, num_targets, squared_norm**0.5, *loss_scales

        return StepResult(read, start_host_copy(slice_norms))


class MemoryBudgetRehearsal:
    """Decides what each layer recomputes (recompute=budget) by a forward pass that changes nothing, on every rank."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def is_due(self) -> bool:
        budget = self._engine.parallel.checkpointing
        return isinstance(budget, MemoryBudget) and budget.is_undecided

    @torch.no_grad()
    def __call__(self, microbatch: Microbatch) -> None:
        engine, parallel, budget = self._engine, self._engine.parallel, self._engine.parallel.checkpointing
        assert isinstance(budget, MemoryBudget)
        samples = engine.batch_sharder.sample_indices(microbatch)
        unchanged = recompute_context(engine.model, parallel.rng_stream, samples)
        with unchanged, budget.rehearsal(parallel.options.device):
            engine.forward_only([microbatch])


class TargetEstimate:
    """Estimates the targets of the first step: scaled or in float16, the gradient of their loss sum would overflow."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def is_due(self) -> bool:
        engine = self._engine
        is_half = engine.parallel.options.compute_dtype == torch.float16
        return engine.num_steps == 0 and (is_half or not engine.normalizer.loss_scaler.recipe.is_one)

    def __call__(self, microbatch: Microbatch) -> None:
        self._engine.normalizer.last_num_targets.fill_(self._engine.batch_sharder.estimate_num_targets(microbatch))
