"""A model whose layers sleep for given times, so that a pipeline of many ranks can be timed on few cores.

[Note: where a layer sleeps]

    F    in its forward
    I    when backward reaches its output, before the input gradient is computed
    W    when the weight gradient is accumulated: the layer applies its weight through a function that passes the
         gradient after a pause. So W sleeps where the runtime computes the gradient, in B or in W

A sleeping rank needs no core. This measures the order of actions, the transfers and the overhead of the runtime.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.pipeline.schedules import FAMILIES, make_schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import Timeline
from echelon.training.engine import Engine

RANKS = 4
MICROBATCHES = 8
WIDTH = 8
WINDOWS = 3
"""steps of an asynchronous schedule that are timed together, with what is left to do after them"""
SCHEDULES = tuple(name for name, family in FAMILIES.items() if not family.has_slices)


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Seconds that every stage sleeps on a microbatch."""

    forward: float
    input_grad: float
    weight_grad: float


AWAKE = Pauses(forward=0.0, input_grad=0.0, weight_grad=0.0)


class _Pause(Function):
    """Its argument, whose gradient passes after some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A layer that sleeps. See [Note: where a layer sleeps]."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = AWAKE
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pauses.forward)
        weight = _Pause.apply(self.weight, self.pauses.weight_grad)
        out: Tensor = _Pause.apply(F.linear(x, weight), self.pauses.input_grad)
        return out


class Sleepers(nn.Module):
    """As many sleeping layers as stages, without pauses at first."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Sleeper() for _ in range(num_layers))

    def set(self, pauses: Pauses) -> None:
        for layer in self.layers:
            layer.pauses = pauses

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        hidden: Any = None
        for index in range(len(self.layers)):
            hidden = self._run(index, hidden, None, x)
        pair: tuple[Tensor, int] = hidden
        return pair

    def pipeline_model(self) -> PipelineModel:
        return PipelineModel(
            layers=tuple(
                PipelineLayer(f"layers.{i}", (f"layers.{i}",), partial(self._run, i)) for i in range(len(self.layers))
            )
        )

    def _run(self, index: int, hidden: Tensor | None, _shared: None, x: Tensor) -> Any:
        out = self.layers[index](x if hidden is None else hidden)
        return (out.sum(), len(out)) if index == len(self.layers) - 1 else out


def pauses_of(schedule: str, unit: float) -> Pauses:
    """A rank's F, I and W of a microbatch take a unit each, whatever the number of its stages."""
    each = unit / (FAMILIES[schedule].chunks or 2)
    return Pauses(forward=each, input_grad=each, weight_grad=each)


def simulated(schedule: str, unit: float) -> float:
    """Seconds of a step; of `WINDOWS` steps and their end, where the schedule is asynchronous."""
    pauses = pauses_of(schedule, unit)
    durations = Durations(forward=pauses.forward, input_grad=pauses.input_grad, weight_grad=pauses.weight_grad)
    windows = WINDOWS if FAMILIES[schedule].asynchronous else 1
    return simulate(make_schedule(schedule, RANKS, windows * MICROBATCHES), durations).duration


class Run:
    """A padded pipeline on the ranks of a process group, warm: shapes are known, and pauses are in force."""

    def __init__(self, schedule: str, unit: float):
        layout = Layout.parse(f"pp={RANKS},schedule={schedule},accumulate={MICROBATCHES},microbatch=1")
        model = Sleepers(RANKS * (FAMILIES[schedule].chunks or 2))
        self.engine = Engine(model, layout, OptimizerConfig(name="sgd", lr=0.0))
        self.windows = WINDOWS if FAMILIES[schedule].asynchronous else 1
        self.batch = {"x": torch.ones(MICROBATCHES, WIDTH)}
        self.seconds()
        model.set(pauses_of(schedule, unit))

    def seconds(self) -> float:
        """From the first rank's start to the last rank's end: the ranks of one machine read one clock."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.windows):
            self.engine.step(self.batch)
        self.engine.drain()
        both = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return float(both.sum())


def measured(schedule: str, unit: float, steps: int) -> list[float]:
    """What `simulated` says, as the ranks really take it, `steps` times."""
    run = Run(schedule, unit)
    return [run.seconds() for _ in range(steps)]


def recorded(schedule: str, unit: float) -> Timeline:
    """A step, action by action."""
    run = Run(schedule, unit)
    assert run.engine.pipeline is not None
    run.engine.pipeline.start_recording()
    run.engine.step(run.batch)
    found = run.engine.pipeline.finish_recording()
    assert found is not None
    return found[1]
