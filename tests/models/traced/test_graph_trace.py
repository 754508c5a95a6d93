"""A trace: operators in order, by readable names; what cannot be traced is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from traced_modules import build

from echelon.models.traced.graph_model import make_traceable
from echelon.models.traced.graph_trace import UntraceableError, trace, tracing_template
from echelon.models.traced.traced_graph import BUFFER, CALL, CONSTANT, INPUT, MODULE, PARAM, TracedGraph


class Zoo(nn.Module):
    """Tied and frozen parameters, buffers that change or not, constants, checks, and modules that stay modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
        self.factor = torch.tensor([2.0])

    def forward(self, ids: Tensor, unused: Tensor | None = None, double: bool = False) -> dict[str, Any]:
        assert ids.dim() == 2
        self.seen += ids.numel()
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) * self.scale + positions[:, None] * self.factor
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x.flatten(0, 1)) + self.shift.view(8).contiguous()
        logits = self.head(x) * (2 if double else 1)
        return {"loss": F.cross_entropy(logits, ids.flatten()), "parts": (logits, ids), "rows": len(ids), "none": None}


@cache
def zoo() -> tuple[Zoo, TracedGraph]:
    torch.manual_seed(0)
    model = Zoo()
    return model, trace(tracing_template(model), {"ids": torch.zeros(3, 5, dtype=torch.long), "double": True})


@cache
def gpt() -> TracedGraph:
    model, batch = build("gpt")
    graph: TracedGraph = make_traceable(model, batch(4, 0)).example_graph()
    return graph


def entries(graph: TracedGraph, kind: str) -> list[str]:
    return [str(op.target) for op in graph.ops if op.kind == kind]


def test_what_enters_a_graph() -> None:
    _, graph = zoo()
    assert entries(graph, INPUT) == ["ids"]
    assert entries(graph, PARAM).count("embed.weight") + entries(graph, PARAM).count("head.weight") == 1
    assert set(entries(graph, BUFFER)) == {"shift", "seen"}
    assert [graph.constants[key].tolist() for key in entries(graph, CONSTANT)] == [[2.0]]


def test_operators_of_a_layer_are_one_segment() -> None:
    _, graph = zoo()
    assert [segment.owner for segment in graph.segments] == ["", "layers.0", "", "layers.1", ""]
    names = [[graph.ops[index].name for index in segment.ops] for segment in graph.segments]
    assert names[1] == ["layers.0.0", "layers.0.1.gelu", "layers.0.2", "layers.0.2.getitem"]
    # The sum behind a layer is called by the model.
    assert names[2] == ["add#3"]
    made: set[int] = set()
    for number, segment in enumerate(graph.segments):
        assert set(segment.reads) <= made
        made |= set(segment.gives)
        later = {i for other in graph.segments[number + 1 :] for i in other.reads}
        assert set(segment.gives) <= later | set(graph.output_refs)


def test_what_depends_on_no_parameter_is_shared() -> None:
    _, graph = zoo()
    shared = {graph.ops[index].op for index in graph.shared}
    assert {"arange", "unsqueeze", "mul"} <= shared
    assert all(graph.ops[index].op not in ("linear", "embedding") for index in graph.shared)
    assert not {index for segment in graph.segments for index in segment.ops} & set(graph.shared)


def test_checks_and_dead_operators_are_dropped() -> None:
    ops = [op.op for op in zoo()[1].ops] + [op.op for op in gpt().ops]
    assert not [op for op in ops if op.startswith(("_assert", "sym_", "assert"))]


def test_names_are_those_of_modules() -> None:
    names = [op.name for op in gpt().ops]
    assert {"embed", "blocks.0.qkv", "blocks.1.down", "blocks.0.gelu", "head", "cross_entropy_loss"} <= set(names)
    assert "blocks.0.add#2" in names
    assert len(set(names)) == len(names)
    numbers = {op.name: op.layer for op in gpt().ops if op.kind == CALL}
    assert (numbers["blocks.1.qkv"], numbers["head"]) == ("blocks.1", "")


def test_gradients_flow_from_trainable_parameters_alone() -> None:
    graph = zoo()[1]
    by_name = {op.name: op for op in graph.ops}
    assert by_name["embed"].is_differentiable
    assert not by_name["scale"].is_differentiable
    assert not by_name["arange"].is_differentiable
    assert not by_name["ids"].is_differentiable


def test_dropouts_and_batch_norms_stay_modules() -> None:
    model, graph = zoo()
    assert entries(graph, MODULE) == ["layers.0.2", "layers.1.2", "norm"]
    assert model.norm.forward.__self__ is model.norm
    assert set(graph.mutated_buffers) == {"seen"}


def test_outputs_keep_their_structure() -> None:
    outputs = zoo()[1].outputs
    assert (set(outputs), outputs["rows"], outputs["none"]) == ({"loss", "parts", "rows", "none"}, 3, None)
    assert isinstance(outputs["parts"], tuple)


def test_a_trace_reads_no_values_and_needs_no_memory() -> None:
    """A model on the meta device with a weight of 4 GiB, and batches there."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 15, 1 << 15), nn.ReLU())
        x = torch.empty(2, 1 << 15)
    template = tracing_template(model)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in template.parameters())
    graph = trace(template, {"input": x})
    assert [op.op for op in graph.ops if op.kind == CALL] == ["linear", "relu"]
    assert graph.ops[-1].shape == (2, 1 << 15)


def test_tensors_are_made_on_the_device_of_the_inputs() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(4, device=x.device)

    graph = trace(Positions(), {"x": torch.empty(4, device="meta")})
    made = next(op for op in graph.ops if op.op == "arange")
    assert made.kwargs["device"] == torch.device("meta")


def test_a_template_is_traced_in_another_dtype() -> None:
    model, batch = build("two-tower")
    traced = make_traceable(model, batch(2, 0))
    traced.retype(torch.bfloat16)
    graph = traced.example_graph()
    assert {op.dtype for op in graph.ops if op.kind == PARAM} == {torch.bfloat16}
    assert next(model.parameters()).dtype == torch.float64


# -- what a trace cannot keep ------------------------------------------------------------------------------------------


class Function(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def changed_input(m: Any, x: Tensor) -> Tensor:
    return x.add_(1) @ m.weight


def changed_parameter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.weight.clamp_(max=1.0)
    return x @ m.weight


RANDOM = {
    "rand": lambda m, x: x @ m.weight * torch.rand_like(x),
    "native_dropout": lambda m, x: F.dropout(x @ m.weight, 0.3),
    "bernoulli": lambda m, x: F.dropout2d((x @ m.weight)[..., None, None], 0.3),
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x @ m.weight, x, x, dropout_p=0.1),
    "exponential": lambda m, x: F.gumbel_softmax(x @ m.weight),
    "rrelu": lambda m, x: F.rrelu(x @ m.weight, training=True),
    "randperm": lambda m, x: (x @ m.weight)[torch.randperm(8)],
}
REFUSED: Mapping[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "branch": (lambda m, x: m.weight * 2 if x.sum() > 0 else m.weight, "let shapes and branches depend on sizes alone"),
    "mask": (lambda m, x: (x @ m.weight)[x > 0].sum(), "a tensor whose size depends on values (index in its forward)"),
    "nonzero": (
        lambda m, x: x.nonzero().sum() + m.weight.sum(),
        "let shapes depend on sizes alone, as torch.where does",
    ),
    "numpy": (lambda m, x: m.weight * x.numpy().sum(), "cannot be traced without values"),
    "own backward": (lambda m, x: Reversed.apply(x @ m.weight), "calls Reversed, an autograd.Function, whose backward"),
    "input": (changed_input, "the forward changes one of its inputs (x); let it return a new tensor"),
    "parameter": (changed_parameter, "the forward changes a parameter (weight); only the optimizer may"),
}
KEPT: Mapping[str, Callable[[Any, Tensor], Any]] = {
    "no dropout": lambda m, x: F.dropout(x @ m.weight, 0.3, training=False) + F.dropout(x, 0.0),
    "plain attention": lambda m, x: F.scaled_dot_product_attention(x @ m.weight, x, x),
    "checkpoint": lambda m, x: checkpoint(lambda t: (t @ m.weight).tanh(), x, use_reentrant=False),
    "number": lambda m, x: (x @ m.weight) * x.sum().item(),
    "no_grad": lambda m, x: without_gradient(m, x) * (x @ m.weight),
    "detach": lambda m, x: (x @ m.weight).detach() * (x @ m.weight),
    "complex": lambda m, x: torch.view_as_real(torch.view_as_complex((x @ m.weight).view(4, 4, 2)) * (1 + 2j)),
    "in place": lambda m, x: (x @ m.weight).mul_(2).clamp_(-1, 1).index_fill_(0, torch.tensor([1]), 3.0),
    "autocast": lambda m, x: in_bfloat16(m, x).float(),
}


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (x @ m.weight).softmax(-1)


def in_bfloat16(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ m.weight


def test_random_operators_are_refused() -> None:
    for name, function in RANDOM.items():
        with pytest.raises(
            UntraceableError, match=r"draws random numbers from torch's own generator \((\w+) in"
        ) as error:
            trace(Function(function), {"x": torch.zeros(4, 8)})
        assert name in str(error.value)
        assert "use nn.Dropout or echelon.rng.RandomDraws, which every layout repeats" in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_graph_is_refused_with_the_reason(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(UntraceableError, match="the forward") as error:
        trace(Function(function), {"x": torch.zeros(4, 8)})
    assert words in str(error.value)
    # Functions have their backward again.
    x = torch.ones(2, requires_grad=True)
    Reversed.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("name", KEPT)
def test_a_trace_keeps_values_and_gradients(name: str) -> None:
    model, x = Function(KEPT[name]), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected = model(x=x)
    expected.sum().backward()
    gradient = model.weight.grad
    model.weight.grad = None
    traced = make_traceable(model, {"x": x})
    traced.runs_graph = True
    found = traced(x=x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.weight.grad, gradient)


TRACE_A_BRANCH = """
import sys
from multiprocessing import synchronize

import torch
from torch import nn

made = []
synchronize.SemLock.__init__ = lambda self, *args, **kwargs: made.append(self)
from echelon.models.traced.graph_trace import UntraceableError, trace

class Branch(nn.Linear):
    def forward(self, x):
        return self.bias if x.sum() > 0 else self.weight

try:
    trace(Branch(2, 2), {"x": torch.zeros(2, 2)})
except UntraceableError:
    trace(nn.Linear(2, 2), {"input": torch.zeros(2, 2)})
    sys.exit(7 + len(made))
"""


def test_an_export_leaves_no_graphs_on_the_terminal_and_no_semaphores() -> None:
    """Of eight ranks, a refusal of one sentence came behind hundreds of lines; semaphores outlived killed ranks."""
    run = subprocess.run([sys.executable, "-c", TRACE_A_BRANCH], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (7, "", "")
