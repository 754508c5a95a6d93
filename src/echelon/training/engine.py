"""`Engine`: one training step of a model in a layout.

The loss contract: the model returns (sum of losses, number of valid targets). Gradients of the sum add up over
microbatches and ranks, as do the counts, and the division happens once (loss_normalizer.py).

[Note: the walk of a step]

    step_microbatches      show the first microbatch to what a first step must find out (step_strategies.py)
    forward_backward       forward and backward of every microbatch, or the pipeline's schedule; gradients are reduced
    update_strategy        all-reduce loss and number of targets; the gradient norm; clipping; the optimizer
    ema, expert_loads      follow the update
    normalizer             remembers the number of targets and adapts the loss scale
    StepResult             is read when someone asks for it

[Note: the host never waits for the device]

The number of targets, the norm and every decision that follows from them stay on the device as tensors. The host only
queues work, so it can be a step ahead of a GPU.

[Note: a skipped step]

A step without a valid target, or whose loss or gradient norm is not finite, updates neither weights nor optimizer
states nor their step count. All ranks share both numbers and skip it together. `Engine.locate_nonfinite` finds the
gradient that was not finite (grad_norm.py). Stages of an asynchronous schedule have norms of their own, and each skips
its updates for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from echelon.models.foreign.causal_lm import ForeignCausalLM, adapt_if_foreign
from echelon.models.layers import check_loss_output
from echelon.models.lora.adapter import adapted_names
from echelon.models.model_config import ModelConfig
from echelon.models.traced.trace_on_demand import trace_if_needed
from echelon.optim import cost, offload_support, optimizer_groups
from echelon.optim.flat_segments import build_flat_segments
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.rules.ema import WeightEMA
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.apply import apply
from echelon.parallel.comm.mesh_axis import world_size
from echelon.parallel.dp.sharded_model import explain_freed_params
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.partial_gradients import PartialGradients
from echelon.parallel.tp.cost import TransformerSizes
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.pipeline.execution.stage_assignment import assign_stages
from echelon.precision import accumulation_dtype
from echelon.precision.loss_scale import LossScale
from echelon.training import step_comm_volume, step_strategies
from echelon.training.batch_sharding import Batch, BatchSharder, Microbatch
from echelon.training.engine_options import validate_engine
from echelon.training.generate import next_token_logits
from echelon.training.grad_norm import GradientNorm, clip_factor
from echelon.training.graphed_step import choose_forward_backward
from echelon.training.guard.nan_debug import NonfiniteLocator, NonfiniteReport
from echelon.training.logging.expert_load_counter import ExpertLoadCounter, experts_per_moe_layer
from echelon.training.loss_normalizer import LossNormalizer
from echelon.training.step_result import StepResult, start_host_copy

ForwardBackward = Callable[[Iterable[Microbatch], float], Tensor]
"""takes a step's microbatches and learning rate; returns this rank's (sum of losses, number of valid targets)"""


INPUTS = ("embed.", "positions.", "blocks.0.norm1.")
"""parameters of built-in models before the first linear"""


def model_config_of(model: nn.Module) -> ModelConfig | None:
    """Return the configuration of a built-in model; None for a user's model."""
    config = getattr(model, "config", None)
    return config if isinstance(config, ModelConfig) else None


def _first_microbatch(batch: Batch, layout: Layout) -> Batch:
    """Return the rows of a global batch that a rank's first forward sees."""
    rows = max(len(next(iter(batch.values()))) // (layout.dp * layout.accumulate), 1)
    return {key: value[:rows] for key, value in batch.items()}


class Engine:
    """A one-device model in a layout, with its optimizer. `step` takes the global batch; each rank takes its rows.

    >>> class Regression(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = torch.nn.Linear(3, 1)
    ...
    ...     def forward(self, x, y):
    ...         return (self.linear(x) - y).square().sum(), torch.tensor(len(x))
    >>> engine = ec.Engine(Regression(), "dp=1")
    >>> result = engine.step({"x": torch.ones(4, 3), "y": torch.zeros(4, 1)})
    >>> result.loss > 0
    True
    """

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
        inputs: Batch | None = None,
    ):
        """`inputs` is a batch of any values: with it a module that declares no split, or no stages, is traced."""
        model = adapt_if_foreign(model)
        layout = check_layout(str(layout), world=world_size(), model=model_config_of(model))
        rule: UpdateRule = optimizer or OptimizerConfig()
        self.update_rule, self.clip = rule, clip
        options, loss_scale = options or ParallelOptions(), loss_scale or LossScale()
        model = trace_if_needed(model, layout, inputs and _first_microbatch(inputs, layout), options.compute_dtype)
        validate_engine(rule, layout, clip=clip, master=options.master_dtype, loss_scale=loss_scale)
        state_bytes = cost.state_bytes_per_element(rule, options.master_dtype.itemsize)
        on_device = offload_support.updates_on_device(rule)
        options = replace(options, optimizer_bytes_per_element=state_bytes, updates_on_device=on_device)

        # What must be read from the full model, before ranks keep their parts of it.
        self.is_built_in = model_config_of(model) is not None
        self.param_names = tuple(name for name, _ in model.named_parameters())
        self.adapted_linears = adapted_names(model)
        """the linears with LoRA adapters"""
        self.trains_inputs = any(p.requires_grad for name, p in model.named_parameters() if name.startswith(INPUTS))
        """whether a built-in model's backward reaches what is before its first linear"""
        self.num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.num_params = sum(p.numel() for p in model.parameters())
        optimizer_groups.check_patterns(rule, self.param_names)
        self.nonfinite_locator = NonfiniteLocator(model)
        num_experts = experts_per_moe_layer(model, layout)

        stages = assign_stages(model, layout, options) if layout.pp > 1 else None
        self.parallel = apply(model, layout, options, stages.modules if stages else None, recorder)
        self.pipeline = Pipeline(stages, self.parallel) if stages else None
        self.recorder = self.parallel.axes.recorder
        self.model, self.layout = self.parallel.model, layout
        self.batch_sharder = BatchSharder(self.parallel)
        self.grad_norm = GradientNorm(self.parallel)
        self.partial_gradients = PartialGradients(self.parallel)
        self.normalizer = LossNormalizer(self.parallel.axes[self.loss_axis], loss_scale, self.parallel.options.device)
        self.before_update: Callable[[], None] = lambda: None
        """called before weights and optimizer states change: a checkpoint that copies them has them when it returns"""
        strategy = step_strategies.UpdateInBackward if rule.in_backward else step_strategies.UpdateAfterBackward
        self.update_strategy = strategy(self)
        self.optimizer: ShardedOptimizer = self.update_strategy.optimizer
        self.ema = WeightEMA(build_flat_segments(self.parallel, rule), rule.ema) if rule.ema else None
        self._has_ema_weights = False
        self.expert_loads = ExpertLoadCounter(self.parallel, num_experts)
        self.num_steps = 0

        self.eager_forward_backward: ForwardBackward = (
            self._pipeline_step if self.pipeline else self._accumulate_gradients
        )
        """forward and backward of a step, kernel by kernel"""
        self.forward_backward: ForwardBackward = choose_forward_backward(self)
        """that, or what takes its place: a CUDA graph (graphed_step.py), a check (guard/replay_check.py)"""
        self._rehearsal = step_strategies.MemoryBudgetRehearsal(self)
        self._first_microbatch_hooks = (self._rehearsal, step_strategies.TargetEstimate(self))
        self._run_step: Callable[[Iterable[Microbatch], float], StepResult] = self._synchronous_step
        if self.pipeline is not None and self.pipeline.asynchronous:
            self._run_step = step_strategies.AsynchronousStep(self, self.pipeline)

    @property
    def loss_axis(self) -> str:
        """The mesh axis over which loss sums and numbers of targets are all-reduced."""
        tokens = self.parallel.token_axis.name
        return f"pp*{tokens}" if self.layout.pp > 1 else tokens

    @property
    def updates_after_backward(self) -> bool:
        """Whether weights and optimizer states change only after backward, on the device."""
        asynchronous = self.pipeline is not None and self.pipeline.asynchronous
        offloaded = any(group.offloaded is not None for group in self.parallel.sharded_model.param_groups)
        return not self.update_rule.in_backward and not asynchronous and not offloaded

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, lr: float | None = None) -> StepResult:
        """Train on the global batch: the same tensors on every rank, a multiple of dp x accumulate rows."""
        return self.step_microbatches(self.microbatches(batch), lr=lr)

    def step_microbatches(self, microbatches: Iterable[Microbatch], *, lr: float | None = None) -> StepResult:
        """Train on this rank's `accumulate` microbatches."""
        microbatches = self.batch_sharder.check_count(self._preview(microbatches))
        with self._kernels():
            result = self._run_step(microbatches, self.update_rule.lr if lr is None else lr)
        self.num_steps += 1
        return result

    def _synchronous_step(self, microbatches: Iterable[Microbatch], lr: float) -> StepResult:
        totals = self.forward_backward(microbatches, lr)
        self.recorder.enter_phase("update")
        grad_scale, norm, slice_norms = self.update_strategy.measure(totals)
        norm = norm * grad_scale
        finite = torch.isfinite(norm) & torch.isfinite(totals[0])
        do_update = (totals[1] > 0) & finite
        self.update_strategy.update(lr, grad_scale * clip_factor(norm, self.clip), do_update)
        if self.ema is not None:
            self.ema.step(do_update)
        self.expert_loads.end_step(do_update)
        loss_scales = self.normalizer.end_step(totals, finite)
        values = torch.cat([totals, torch.stack([norm, *loss_scales])])
        return StepResult(start_host_copy(values), start_host_copy(slice_norms))

    def _accumulate_gradients(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        """Forward and backward, microbatch by microbatch; totals are over all ranks under UpdateInBackward."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        for index, microbatch in enumerate(microbatches):
            is_last = index == self.layout.accumulate - 1
            inputs, seed = self.prepare(microbatch), self.normalizer.backward_seed
            self.run_microbatch(inputs, totals, seed, lr, first=index == 0, last=is_last)
        return totals

    def run_microbatch(
        self, inputs: Batch, totals: Tensor, seed: Tensor, lr: float, *, first: bool = True, last: bool = True
    ) -> None:
        """Forward and backward of prepared inputs, from a gradient of the loss sum; adds its own to `totals`."""
        sharded_model = self.parallel.sharded_model
        sharded_model.begin_microbatch(first=first, last=last)
        with explain_freed_params():
            with self.parallel.saved_tensor_context():
                total, count = check_loss_output(self.model(**inputs))
            totals[0] += total.detach()
            totals[1] += count
            if last:
                self.update_strategy.before_last_backward(totals, lr)
            self.recorder.enter_phase("backward")
            if total.requires_grad:
                total.backward(seed.to(total.dtype).expand_as(total))
        sharded_model.end_microbatch()

    def _pipeline_step(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        assert self.pipeline is not None
        inputs = self.batch_sharder.pipeline_microbatches(microbatches)
        return self.pipeline.runtime.train(inputs, self.normalizer.backward_seed)

    def _preview(self, microbatches: Iterable[Microbatch]) -> Iterable[Microbatch]:
        """Show the first microbatch to the hooks that are due, before the step begins."""
        due = [hook for hook in self._first_microbatch_hooks if hook.is_due()]
        if not due:
            return microbatches
        coming = iter(microbatches)
        first = list(islice(coming, 1))
        for hook in due if first else ():
            hook(first[0])
        return chain(first, coming)

    def locate_nonfinite(self, result: StepResult) -> NonfiniteReport | None:
        """Report which loss or gradient of a step was not finite, if any. All ranks must call it in the same order."""
        return None if result.finite else self.nonfinite_locator.locate(self, result)

    def rehearse_memory_budget(self, microbatch: Microbatch) -> None:
        """Decide now what each layer recomputes (recompute=budget); all ranks must call it."""
        if self._rehearsal.is_due():
            self._rehearsal(microbatch)

    def drain(self) -> None:
        """Finish every update in flight, of an asynchronous schedule or on the host."""
        if self.pipeline is not None:
            self.pipeline.runtime.drain()
        for group in self.parallel.sharded_model.param_groups:
            if group.offloaded is not None:
                group.offloaded.wait()

    def close(self) -> None:
        """End the threads and files of offloaded states. The engine cannot train afterwards."""
        self.parallel.offload.close()

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        plain = dispatch.plain_torch() if self.parallel.options.kernels == "plain" else nullcontext()
        with plain, accumulation_dtype.fp32_accumulation():
            yield

    # -- batches ------------------------------------------------------------------------------------------------------

    def microbatches(self, batch: Batch, step: int | None = None) -> Iterator[Microbatch]:
        """Yield this rank's microbatches of the global batch, for the next step or another one."""
        batch = self.model.loss_inputs(batch) if isinstance(self.model, ForeignCausalLM) else batch
        return self.batch_sharder.microbatches(batch, self.num_steps if step is None else step)

    def row_ranges(self, batch: int) -> Iterator[range]:
        """Yield this rank's rows of a global batch, microbatch by microbatch."""
        return self.batch_sharder.row_ranges(batch)

    def prepare(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the microbatch on the device, floats in the compute dtype; dropout learns its sample indices."""
        return self.batch_sharder.prepare(microbatch)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Microbatch]) -> float | None:
        """Return the mean loss over all ranks' microbatches, without dropout, of the EMA weights if there are any.

        None where no microbatch has a target.
        """
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
        """Run the forward passes of a step, for observers of the model."""
        with self._kernels():
            self._forward_totals(microbatches)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Give the model the moving average of its weights, where one is kept (optimizer.ema)."""
        if self.ema is None or self._has_ema_weights:
            yield
            return
        self._swap_ema(self.ema)
        try:
            yield
        finally:
            self._swap_ema(self.ema)

    def _swap_ema(self, ema: WeightEMA) -> None:
        self._has_ema_weights = not self._has_ema_weights
        self.before_update()
        ema.swap()
        self.parallel.sharded_model.after_update()

    def _forward_totals(self, microbatches: Iterable[Microbatch]) -> Tensor:
        """Return (sum of losses, number of valid targets) of this rank's microbatches."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(self.batch_sharder.pipeline_microbatches(microbatches))
        totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.options.device)
        for microbatch in microbatches:
            total, count = check_loss_output(self.model(**self.prepare(microbatch)))
            totals[0] += total
            totals[1] += count
        return totals

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor, vocab_size: int) -> Tensor:
        """float64 [vocab_size]: logits after the last token of the only sequence, on every rank."""
        with self._kernels():
            return next_token_logits(self, tokens, vocab_size)

    def non_layer_params_unsharded(self) -> AbstractContextManager[None]:
        """Keep parameters outside layers unsharded around `next_token_logits`, whose hooks gather the layers only."""
        return self.parallel.sharded_model.non_layer_params_unsharded() if self.pipeline is None else nullcontext()

    # -- cost ---------------------------------------------------------------------------------------------------------

    def collectives(self, sizes: TransformerSizes | None = None) -> list[Collective]:
        """Return the collectives of one step on this rank, from the strategies' cost functions.

        `sizes` describes a transformer where tp, cp or pp is above 1. The first step of a pipeline also sends shapes.
        """
        return step_comm_volume.step_collectives(self, sizes)

    def host_transfer_bytes(self) -> dict[str, int]:
        """Return the bytes that one step moves between this rank's device and its host, without activations."""
        return step_comm_volume.host_transfer_bytes(self)
