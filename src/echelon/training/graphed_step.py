"""`GraphedForwardBackward`: forward and backward of a launch-bound step as one CUDA graph.

A small model's kernels run faster than the host launches them. A graph launches all of them at once.

[Note: what a graph repeats]

A graph repeats kernels with the addresses of their tensors, and no Python. So its inputs are copied into the tensors
that it was captured with, the gradients are where the capture allocated them, and nothing that Python decides may
change from step to step. That holds for our own models without dropout and without experts, whose sizes depend on
values; on one device, without offloading, several microbatches or hooks of others. Everything else runs as before, as
does a batch of another shape.

[Note: when it is worth it]

Steps 0 and 1 compile kernels. In step 2 the host measures the time that it needs to launch a step, and the device
the time that it needs to run it. If the host needs nearly as long, step 3 is captured; `cuda_graphs=on` always does.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon import compat
from echelon.layout import Layout
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.rng import RandomSite
from echelon.training.batch_sharding import Batch, Microbatch

if TYPE_CHECKING:
    from echelon.training.engine import Engine

WARM_UP_STEPS = 2
"""steps that compile kernels and fill caches"""
LAUNCH_BOUND = 0.8
"""a step is captured if the host needs this share of the device's time, or more, to launch it"""


def why_not_graphed(engine: Engine) -> str:
    """Why no step of this engine may be captured; empty if it may."""
    options, layout, rule = engine.parallel.options, engine.layout, engine.update_rule
    reasons = {
        "cuda_graphs=off": options.cuda_graphs == "off",
        "a CPU has no CUDA graphs": options.device.type != "cuda",
        "only steps of one device and one microbatch are captured": not _is_plain(layout),
        "compression packs tensors in Python": options.compress != "none",
        "updates run inside backward": rule.in_backward,
        "dropout draws other numbers in every step": any(
            isinstance(module, RandomSite) and getattr(module, "p", 1.0) > 0 for module in engine.model.modules()
        ),
        "sizes of experts' inputs depend on values": bool(engine.expert_loads.num_experts),
        "Python of other models may change from step to step": not engine.is_built_in and options.cuda_graphs != "on",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def choose_forward_backward(engine: Engine) -> Callable[[Iterable[Microbatch], float], Tensor]:
    """What computes the steps of an engine: a graph if it may, else kernel by kernel; `cuda_graphs=on` reports why."""
    reason = why_not_graphed(engine)
    if not reason:
        return GraphedForwardBackward(engine)
    if engine.parallel.options.cuda_graphs == "on" and world_rank() == 0:
        warnings.warn(f"steps run without a CUDA graph ({reason}); leave cuda_graphs out", stacklevel=2)
    return engine.eager_forward_backward


def _is_plain(layout: Layout) -> bool:
    return layout.world == 1 and layout.accumulate == 1 and layout.offload == "none" and layout.recompute != "budget"


class GraphedForwardBackward:
    """Stands in for `Engine.eager_forward_backward`; see the notes."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps = 0
        self._launch_s = 0.0
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph: _StepGraph | None = None
        self._hooked = _hooked_modules(engine.model)
        self.is_decided = False

    def __call__(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        (microbatch,) = microbatches
        step, self._steps = self._steps, self._steps + 1
        if self._graph is not None:
            inputs = self._engine.prepare(microbatch)
            if self._graph.fits(inputs):
                return self._graph.replay(inputs)
        elif step == WARM_UP_STEPS and not self.is_decided:
            return self._timed(microbatch, lr)
        elif not self.is_decided:
            if step > WARM_UP_STEPS:
                self._decide(microbatch)
            if self._graph is not None:
                return self._graph.replay(self._engine.prepare(microbatch))
        return self._engine.eager_forward_backward([microbatch], lr)

    def _timed(self, microbatch: Microbatch, lr: float) -> Tensor:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._start.record()
        totals = self._engine.eager_forward_backward([microbatch], lr)
        self._end.record()
        self._launch_s = time.perf_counter() - started
        return totals

    def _decide(self, microbatch: Microbatch) -> None:
        self.is_decided = True
        if _hooked_modules(self._engine.model) != self._hooked:
            return  # somebody watches modules
        self._end.synchronize()
        if (
            self._engine.parallel.options.cuda_graphs != "on"
            and self._launch_s < LAUNCH_BOUND * self._start.elapsed_time(self._end) / 1e3
        ):
            return
        try:
            self._graph = _StepGraph(self._engine, self._engine.prepare(microbatch))
        except RuntimeError as error:  # an operator that waits for the device cannot be captured; nor can a full device
            self._engine.parallel.sharded_model.free_grads()
            first = str(error).strip().splitlines()[0][:200]
            warnings.warn(f"steps run without a CUDA graph ({first}); set cuda_graphs=off", stacklevel=2)


class _StepGraph:
    """A captured step: its inputs, its seed of backward, its gradients and totals."""

    def __init__(self, engine: Engine, inputs: Batch):
        self._engine, self._training = engine, engine.model.training
        self._inputs = {key: value.clone() for key, value in inputs.items()}
        self._seed = engine.normalizer.backward_seed.clone()
        self._graph = torch.cuda.CUDAGraph()
        self._totals = torch.zeros(2, dtype=torch.float64, device=engine.parallel.options.device)
        torch.cuda.empty_cache()  # the graph allocates memory of its own
        with torch.cuda.graph(self._graph):
            self._totals.zero_()
            engine.run_microbatch(self._inputs, self._totals, self._seed, lr=0.0)  # updates are outside
        self._grads = [(group, group.reduction.detach()) for group in engine.parallel.sharded_model.trainable_groups]

    def fits(self, inputs: Batch) -> bool:
        """Whether the graph was captured with inputs of these shapes and dtypes, in this mode."""
        return self._engine.model.training == self._training and _signature(inputs) == _signature(self._inputs)

    def replay(self, inputs: Batch) -> Tensor:
        for key, value in inputs.items():
            self._inputs[key].copy_(value)
        self._seed.copy_(self._engine.normalizer.backward_seed)
        self._engine.recorder.enter_phase("backward")  # forward and backward are one launch
        self._graph.replay()
        for group, tensors in self._grads:
            group.reduction.attach(*tensors)
        return self._totals.clone()


def _hooked_modules(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if compat.has_hooks_or_patched_forward(module)]


def _signature(inputs: Batch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (value.shape, value.dtype) for key, value in inputs.items()}
