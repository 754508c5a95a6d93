"""Steps as one CUDA graph: which may be captured, and that a captured step is the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import ON_GPU
from torch import Tensor, nn

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.models import model_config
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.graphed_step import GraphedForwardBackward, why_not_graphed

on_gpu = pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def engine(layout: str = "dp=1", *, model: str = "gpt-tiny", dropout: float = 0.0, **options: Any) -> Engine:
    config = replace(model_config.find_model(model), dropout=dropout)
    chosen = ParallelOptions(**{"device": DEVICE, "cuda_graphs": "on", **options})
    return Engine(models.build(config, "meta"), layout, OptimizerConfig(lr=1e-3), clip=1.0, options=chosen)


def batch(step: int, length: int = 32, rows: int = 4) -> dict[str, Tensor]:
    tokens = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return (self.linear(x) - y).square().sum(), torch.tensor(len(x), device=x.device)


def test_what_may_not_be_captured() -> None:
    with pytest.warns(UserWarning, match=r"steps run without a CUDA graph \(a CPU has no CUDA graphs\)"):
        on_cpu = engine(device=torch.device("cpu"))
    assert why_not_graphed(on_cpu) == "a CPU has no CUDA graphs"
    assert on_cpu.forward_backward == on_cpu.eager_forward_backward
    assert engine(device=torch.device("cpu"), cuda_graphs="auto"), "which asks for nothing, and hears nothing"
    assert why_not_graphed(engine(cuda_graphs="off")) == "cuda_graphs=off"
    if ON_GPU:
        assert not why_not_graphed(engine())
        assert "one microbatch" in why_not_graphed(engine("dp=1,accumulate=2", cuda_graphs="auto"))
        assert "dropout" in why_not_graphed(engine(dropout=0.1, cuda_graphs="auto"))
        assert "experts" in why_not_graphed(engine(model="moe-tiny", cuda_graphs="auto"))
        auto = ParallelOptions(device=DEVICE)
        assert "Python" in why_not_graphed(Engine(Regression(), "dp=1", options=auto))


def run(graphs: str, steps: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor], Engine]:
    one = engine(cuda_graphs=graphs, compute_dtype=dtype)
    losses = [one.step(batch(step)).loss for step in range(steps)]
    losses.append(one.step(batch(99, length=20, rows=2)).loss)  # another shape runs without the graph
    losses += [one.step(batch(step)).loss for step in range(steps, steps + 3)]
    return losses, {name: p.detach().clone() for name, p in one.model.named_parameters()}, one


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_is_the_step(dtype: torch.dtype) -> None:
    losses, weights, one = run("on", 6, dtype)
    wanted, plain_weights, other = run("off", 6, dtype)
    assert isinstance(one.forward_backward, GraphedForwardBackward)
    assert one.forward_backward._graph is not None
    assert not isinstance(other.forward_backward, GraphedForwardBackward)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # attention's backward adds in any order
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=tolerance, atol=tolerance)
    for name, value in weights.items():
        torch.testing.assert_close(value, plain_weights[name], rtol=tolerance, atol=tolerance)


@on_gpu
def test_a_captured_step_sees_its_batch_its_weights_and_its_rate() -> None:
    """Losses fall on one batch, an unseen batch has another loss, and a step with lr=0 changes nothing."""
    one = engine()
    first = [one.step(batch(0)).loss for _ in range(12)]
    assert first[-1] < first[5] < first[0]
    assert abs(one.step(batch(7), lr=0.0).loss - one.step(batch(0), lr=0.0).loss) > 0.1
    assert one.step(batch(0), lr=0.0).loss == pytest.approx(one.step(batch(0), lr=0.0).loss, rel=1e-5)
    assert one.evaluate(one.microbatches(batch(0))) == pytest.approx(one.step(batch(0), lr=0.0).loss, rel=1e-4)


@on_gpu
def test_an_operator_that_waits_for_the_device_runs_without_a_graph() -> None:
    class Waiting(Regression):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            assert float(x.sum()) > 0  # reads a value
            return super().forward(x, y)

    one = Engine(Waiting(), "dp=1", options=ParallelOptions(device=DEVICE, cuda_graphs="on"))
    given = {"x": torch.ones(4, 3), "y": torch.zeros(4, 1)}
    with pytest.warns(UserWarning, match=r"steps run without a CUDA graph \(.*\); set cuda_graphs=off"):
        losses = [one.step(given).loss for _ in range(6)]
    assert losses[-1] < losses[0]


@on_gpu
def test_only_launch_bound_steps_are_captured() -> None:
    small = engine(cuda_graphs="auto")
    for step in range(5):
        small.step(batch(step))
    assert small.forward_backward._graph is not None
    config = replace(model_config.find_model("gpt-tiny"), width=4096, heads=32, ffn=16384, layers=1)
    large = Engine(
        models.build(config, "meta"), "dp=1", OptimizerConfig(lr=1e-3), options=ParallelOptions(device=DEVICE)
    )
    for step in range(5):
        large.step(batch(step, length=128, rows=64))
    assert large.forward_backward.is_decided
    assert large.forward_backward._graph is None
