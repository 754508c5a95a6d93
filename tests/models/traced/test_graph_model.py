"""A module that runs from its graph computes what it was written to: values, gradients, buffers, for any sizes."""

from __future__ import annotations

import copy
from collections import namedtuple
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from traced_modules import MODULES, build, words

from echelon.layout import Layout
from echelon.models.traced.graph_model import GraphModel, make_traceable
from echelon.models.traced.trace_on_demand import needs_graph, trace_if_needed
from echelon.rng import Dropout, RandomStream, attach_stream


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@cache
def pair(name: str) -> tuple[nn.Module, Any, Any]:
    """A module, the same one from its graph, and its batches; without dropout."""
    model, batch = build(name)
    model = without_dropout(model)
    traced = make_traceable(copy.deepcopy(model), batch(4, 0))
    traced.runs_graph = True
    return model, traced, batch


def run(model: nn.Module, inputs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = model(**inputs)[0]
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "state-space"])
def test_a_graph_computes_what_the_module_does(name: str) -> None:
    model, traced, batch = pair(name)
    for step, rows in ((0, 4), (1, 6)):
        loss, gradients = run(model, batch(rows, step))
        found, its = run(traced, batch(rows, step))
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
        for key, gradient in gradients.items():
            torch.testing.assert_close(its[key], gradient, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        whole = model.eval()(**batch(2, 5))[0]  # torch's encoder has kernels of its own for evaluation
        torch.testing.assert_close(traced.eval()(**batch(2, 5))[0], whole, rtol=1e-12, atol=1e-12)
    model.train(), traced.train()


def test_other_lengths_are_traced_when_they_come_and_once() -> None:
    model, traced, _ = pair("gpt")
    short = {key: value[:, :5].contiguous() for key, value in words(3).items()}
    for inputs in (words(3), short):
        torch.testing.assert_close(traced(**inputs)[0], model(**inputs)[0])
    known = len(traced._graphs)
    traced(**words(3, 1))
    assert len(traced._graphs) == known


def test_calls_by_position_are_refused() -> None:
    _, traced, batch = pair("two-tower")
    with pytest.raises(ValueError, match="TwoTower runs from a traced graph; call it with keyword arguments"):
        traced(*batch(4, 0).values())


def test_a_traced_class_keeps_its_name_and_runs_as_written_before() -> None:
    model, batch = build("two-tower")
    traced = make_traceable(model, batch(4, 0))
    assert type(traced).__name__ == "TwoTower"
    assert isinstance(traced, GraphModel)
    assert traced is model
    assert traced(*batch(4, 0).values())[0].shape == ()
    assert traced._graphs == {}
    assert make_traceable(traced, batch(2, 0)) is traced
    assert set(traced.state_dict()) == set(build("two-tower")[0].state_dict())


def test_hooks_of_layers_run() -> None:
    """Parameter groups and checkpointing hook the layers' calls."""
    _, traced, batch = pair("llama")
    seen: list[str] = []
    handles = [
        traced.get_submodule(name).register_forward_pre_hook(lambda _module, _args, name=name: seen.append(name))
        for name in ("layers.0", "layers.1")
    ]
    traced(**batch(4, 0))
    assert seen == ["layers.0", "layers.1"]
    for handle in handles:
        handle.remove()


Result = namedtuple("Result", ["loss", "count"])


class Statistics(nn.Module):
    """Batch statistics, a moving average, a call counter that its result reads, and one layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Result:
        self.calls += 1
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).tanh() * self.calls
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        x = self.norm(x) - self.mean
        x[:, 0] = 0
        x[1:3] += 1
        return Result(x.square().sum(), len(x))


def test_buffers_change_as_in_the_module() -> None:
    torch.manual_seed(0)
    model = Statistics().double()
    x = torch.randn(6, 8, dtype=torch.float64)
    traced = make_traceable(copy.deepcopy(model), {"x": x})
    traced.runs_graph = True
    for step in range(3):
        (loss, gradients), (found, its) = run(model, {"x": x + step}), run(traced, {"x": x + step})
        torch.testing.assert_close(found, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(its[name], gradient)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(traced.get_buffer(name), buffer)
            assert not traced.get_buffer(name).requires_grad
    assert type(traced(x=x)) is type(model(x=x)) is Result
    assert [segment.owner for segment in traced.example_graph().segments].count("layers.0") == 2
    # In evaluation a BatchNorm changes nothing.
    before = traced.norm.running_mean.clone()
    torch.testing.assert_close(traced.eval()(x=x).loss, model.eval()(x=x).loss)
    assert torch.equal(traced.norm.running_mean, before)


def test_dropouts_run_as_modules() -> None:
    model, batch = build("gpt")
    traced = make_traceable(copy.deepcopy(model), batch(4, 0))
    traced.runs_graph = True
    for each in (model, traced):
        stream = RandomStream(3)
        stream.samples = torch.arange(4)
        attach_stream(each, stream)
    assert isinstance(traced.blocks[0].drop, Dropout)
    torch.testing.assert_close(traced(**batch(4, 0))[0], model(**batch(4, 0))[0])
    other = traced(**batch(4, 0))[0].item()
    traced.blocks[0].drop.stream.samples = torch.arange(4, 8)
    assert traced(**batch(4, 0))[0].item() != other


# -- pipeline layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "u-net", "two-tower"])
def test_pipeline_layers_compute_what_the_module_does(name: str) -> None:
    model, traced, batch = pair(name)
    pipeline = traced.pipeline_model()
    inputs = batch(4, 0)
    shared, hidden = pipeline.shared(**inputs), None
    for layer in pipeline.layers:
        hidden = layer.run(hidden, shared, **inputs)
    torch.testing.assert_close(hidden[0], model(**inputs)[0])


def test_pipeline_layers_hold_each_parameter_and_tied_ones_together() -> None:
    model, traced, _ = pair("gpt")
    layers = traced.pipeline_model().layers
    assert [layer.name for layer in layers] == ["between#0", "blocks.0", "blocks.1", "between#3"]
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert any(name == held or name.startswith(f"{held}.") for layer in layers for held in layer.modules), name
    # A tied weight is on both stages that read it.
    assert {"embed.weight", "head.weight"} <= set(layers[0].modules)
    assert {"embed.weight", "head.weight"} <= set(layers[-1].modules)


class Shared(nn.Module):
    """The second layer reads the statistics of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x - self.mean)
        x = self.layers[1](x) * self.mean
        self.mean.copy_(x.detach().mean(0))
        return x.sum(), torch.tensor(len(x))


def test_a_buffer_of_two_layers_is_refused_by_pipelines() -> None:
    traced = make_traceable(Shared(), {"x": torch.zeros(2, 4)})
    with pytest.raises(ValueError, match=r"reads the buffer mean, which changes in .*use pp=1"):
        traced.pipeline_model()


# -- when a graph is asked for -----------------------------------------------------------------------------------------


def test_a_graph_is_needed_where_a_model_declares_nothing() -> None:
    model, batch = build("gpt")
    for layout, needed in (("dp=2", False), ("tp=2", True), ("pp=2", True), ("dp=2,zero=3", False)):
        assert needs_graph(model, Layout.parse(layout)) == needed
    model.split = {"blocks.*.qkv.weight": "S0"}  # states override what is derived
    assert needs_graph(model, Layout.parse("tp=2"))
    model.split = {"blocks.*.up": "column", "blocks.*.down": "row"}
    assert not needs_graph(model, Layout.parse("tp=2"))
    assert trace_if_needed(model, Layout.parse("tp=2"), batch(2, 0)) is model
    assert not isinstance(model, GraphModel)


@pytest.mark.parametrize("layout", ["cp=2,tp=2", "ep=2,dp=2,tp=2"])
def test_axes_that_divide_sequences_or_experts_are_refused(layout: str) -> None:
    model, batch = build("gpt")
    with pytest.raises(ValueError, match="runs from its traced graph"):
        trace_if_needed(model, Layout.parse(layout), batch(2, 0))


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Any]:
        out = self.linear(x)
        return {"loss": out.sum() * scale, "other": F.mse_loss(out, x if y is None else y), "shapes": [out, (x,)]}


def test_several_outputs_and_arguments_that_are_no_tensors() -> None:
    model = TwoLosses()
    x = torch.randn(3, 4)
    traced = make_traceable(copy.deepcopy(model), {"x": x, "scale": 2.0})
    traced.runs_graph = True
    for inputs in ({"x": x, "scale": 2.0}, {"scale": 3.0, "x": x}, {"y": x + 1, "x": x}):
        expected, found = model(**inputs), traced(**inputs)
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["other"], expected["other"])
        assert isinstance(found["shapes"], list)
        assert found["shapes"][1][0] is x


def test_a_compiled_layer_is_refused() -> None:
    """Its call would not reach the layer's graph, and failed with torch's words for a wrong number of arguments."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"torch\.compile \(1 is compiled\); give the module as it was before"):
        make_traceable(model, {"input": torch.zeros(2, 4)})


def test_a_module_without_layers_has_no_stages() -> None:
    traced = make_traceable(TwoLosses(), {"x": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match=r"TwoLosses has no nn\.ModuleList or nn\.Sequential"):
        traced.pipeline_model()
