"""Layers of a user's model are compiled, each class once, and compute what they computed before."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from foreign_families import build_family
from tiny_engines import SGD
from torch import Tensor, nn
from torch.nn import functional as F
from traced_modules import PlainGPT, words

from echelon.launch.rank_pool import RankPool
from echelon.models.foreign.causal_lm import ForeignLayer, derive_class
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.regional_compile import (
    STATIC_COMPILATIONS,
    CompiledClass,
    compilable_layers,
    compiled_layers,
    is_asked_for,
    layers_as_written,
)
from echelon.training.engine import Engine
from echelon.training.guard.module_outputs import watch_outputs
from echelon.training.wrap import wrap

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
FLOAT64 = {"compute_dtype": torch.float64, "master_dtype": torch.float64}


class CountsCompilations:
    """A backend that runs graphs as they are, with gradients as compiled code has them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def foreign(name: str, layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    keys = ("n_layer",) if name == "gpt2" else ("num_hidden_layers",)
    changes: dict[str, Any] = dict.fromkeys(keys, layers)
    if name == "gemma3":
        changes["layer_types"] = ["full_attention"] * layers
    return build_family(name, changes).double()


def tokens(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def train(model: nn.Module, batch: dict[str, Tensor], layout: str, steps: int = 2, **options: Any) -> dict[str, Tensor]:
    engine = Engine(model, layout, SGD, options=ParallelOptions(**FLOAT64, **options))
    engine.model.train()
    losses = [torch.tensor(engine.step(batch).loss) for _ in range(steps)]
    return {**dict(enumerate(losses)), **{name: p.detach().clone() for name, p in engine.model.named_parameters()}}


def check_equal(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral", "gemma3"])
def test_layers_of_a_class_compile_once_and_as_one_graph(name: str) -> None:
    """GPT-2 has dropout, whose masks differ by layer. A graph break would be reported, and warnings are errors."""
    backend, layout = CountsCompilations(), "dp=1,microbatch=2,accumulate=2"
    expected = train(foreign(name), tokens(), layout, compile="off")
    found = train(foreign(name), tokens(), layout, compile="on", compile_backend=backend)
    check_equal(found, expected)
    assert backend.graphs == 1


def train_on_ranks(name: str, layout: str) -> list[tuple[float, float, int]]:
    """Losses as written and compiled, and the compilations, of each step on one rank."""
    outcomes = []
    backend, engines = CountsCompilations(), []
    for options in ({"compile": "off"}, {"compile": "on", "compile_backend": backend}):
        engine = Engine(foreign(name, 4), layout, SGD, options=ParallelOptions(**FLOAT64, **options))
        engine.model.train()
        engines.append(engine)
    for _ in range(3):
        losses = [engine.step(tokens()).loss for engine in engines]
        outcomes.append((*losses, backend.graphs))
    return outcomes


NONE, WHOLE, PARTS = 0, 2, 12
"""most compilations of one class: recomputation may have one of its own, and collectives leave seven parts of Llama"""


@pytest.mark.parametrize(
    ("name", "layout", "most"),
    [
        ("llama", "dp=2,zero=3,recompute=full", WHOLE),
        ("llama", "pp=2,accumulate=2", WHOLE),
        ("llama", "tp=2", PARTS),
        pytest.param("gpt2", "tp=2,recompute=full", NONE, marks=pytest.mark.soak),
        pytest.param("llama", "tp=2,sp=0", PARTS, marks=pytest.mark.soak),
        pytest.param("llama", "dp=2,zero=2,accumulate=2", WHOLE, marks=pytest.mark.soak),
        pytest.param(
            "gpt2", "pp=2,schedule=interleaved,vpp=2,accumulate=2,recompute=full", WHOLE, marks=pytest.mark.soak
        ),
    ],
)
def test_compiled_layers_on_ranks(name: str, layout: str, most: int, pool: RankPool) -> None:
    """The second and third losses follow from gradients: all-gathered weights, several microbatches in flight."""
    for outcomes in pool.run(train_on_ranks, 2, name, layout, timeout=120.0):
        for as_written, compiled, _graphs in outcomes:
            assert compiled == pytest.approx(as_written, rel=1e-11)
        assert outcomes[0][2] == outcomes[-1][2] <= most, outcomes
        assert (outcomes[0][2] == 0) == (most == NONE), outcomes


def test_a_recomputed_layer_runs_compiled() -> None:
    backend = CountsCompilations()
    expected = train(foreign("gpt2"), tokens(), "dp=1")
    check_equal(
        train(foreign("gpt2"), tokens(), "dp=1,recompute=full", compile="on", compile_backend=backend), expected
    )
    assert backend.graphs in (1, 2)  # recomputation may run in another mode of autograd


def test_a_custom_module_is_compiled() -> None:
    backend = CountsCompilations()
    torch.manual_seed(0)
    model = PlainGPT(layers=3).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model, words(4), "dp=1")
    again = PlainGPT(layers=3).double()
    again.load_state_dict(state)
    check_equal(train(again, words(4), "dp=1", compile="on", compile_backend=backend), expected)
    assert backend.graphs == 1


def test_a_user_loop_under_autocast() -> None:
    """The head's loss chooses its dtype under autocast too."""
    backend, batch = CountsCompilations(), tokens()
    losses = []
    for compile in ("off", "on"):
        model = wrap(foreign("llama").float(), "dp=1", compile=compile, compile_backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total, count = model(**batch)
        model.mean(total, count).backward()
        losses.append(float(total.detach()))
        assert all(p.grad is not None for p in model.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert backend.graphs == 1


class Block(nn.Module):
    def __init__(self, reads_values: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.reads_values, self.fails = nn.Linear(8, 8), reads_values, fails

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.reads_values and float(x.detach().sum()) > 1e9:
            x = x * 2
        if self.fails:
            raise ValueError("a block failed")
        return x + x.tanh()


class Stack(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), torch.tensor(len(x))


ROWS = {"x": torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)}


def test_a_graph_break_is_reported_once() -> None:
    expected = train(Stack().double(), ROWS, "dp=1")
    with pytest.warns(
        UserWarning, match="layers Block are compiled in parts: .*; compile=off turns this off"
    ) as caught:
        found = train(Stack(reads_values=True).double(), ROWS, "dp=1", compile="on", compile_backend="aot_eager")
    assert len(caught) == 1
    check_equal(found, expected)


def test_a_graph_break_in_a_recomputed_layer_leaves_it_as_written() -> None:
    """Parts need not save the same tensors when they run again."""
    expected, layout = train(Stack().double(), ROWS, "dp=1"), "dp=1,recompute=full"
    with pytest.warns(UserWarning, match="layers Block are not compiled: .*; compile=off") as caught:
        found = train(Stack(reads_values=True).double(), ROWS, layout, compile="on", compile_backend="aot_eager")
    assert len(caught) == 1
    check_equal(found, expected)


def test_one_layer_of_a_class_that_fails_leaves_the_others_compiled() -> None:
    """They are recomputed by the code that they ran."""
    expected, layout, backend = train(Stack().double(), ROWS, "dp=1"), "dp=1,recompute=full", CountsCompilations()
    stack = Stack().double()
    stack.blocks[1].reads_values = True
    with pytest.warns(UserWarning, match="layers Block are not compiled: .*; compile=off") as caught:
        check_equal(train(stack, ROWS, layout, compile="on", compile_backend=backend), expected)
    assert len(caught) == 1
    assert backend.graphs >= 1


def test_an_error_of_the_compiler_is_reported_once_and_layers_run_as_written() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such operator\nand more")

    expected = train(Stack().double(), ROWS, "dp=1")
    with pytest.warns(UserWarning, match="layers Block are not compiled: no such operator; compile=off") as caught:
        check_equal(train(Stack().double(), ROWS, "dp=1", compile="on", compile_backend=broken), expected)
    assert len(caught) == 1


def test_an_error_of_the_layer_is_its_own() -> None:
    model = Stack(fails=True).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="a block failed"):
            train(model, ROWS, "dp=1", compile="on", compile_backend="aot_eager")


def test_modules_inside_a_layer_are_watched_where_layers_run_as_written() -> None:
    options = ParallelOptions(**FLOAT64, compile="on", compile_backend="aot_eager")
    engine = Engine(Stack().double(), "dp=1", SGD, options=options)
    assert compiled_layers(engine.model) == {"Block": 3}
    names: list[str] = []
    with watch_outputs(engine.model, lambda name, _value: names.append(name)):
        engine.step(ROWS)
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    engine.step(ROWS)
    with layers_as_written(), watch_outputs(engine.model, lambda name, _value: names.append(name)):
        engine.step(ROWS)
    assert names[3:5] == ["blocks.0.linear", "blocks.0"]


def test_many_shapes_end_in_code_for_any_shape() -> None:
    compiled, block = CompiledClass(Block, CountsCompilations()), Block()
    for rows in range(2, STATIC_COMPILATIONS + 12):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(block, x), block(x))
    assert STATIC_COMPILATIONS < compiled.num_compilations < STATIC_COMPILATIONS + 4
    assert compiled.is_whole


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [("dp=1,recompute=ops", {}, "recompute=ops"), ("dp=1", {"compress": "lossless"}, "compress=lossless")],
)
def test_what_must_see_operators_is_named(layout: str, options: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=f"layers are not compiled: {reason}"):
        Engine(Stack().double(), layout, SGD, options=ParallelOptions(**FLOAT64, **options, compile="on"))


def test_what_is_compiled() -> None:
    blocks = nn.ModuleList([Block(), nn.Linear(8, 8), nn.ModuleList([Block()]), Block()])
    blocks[3].compile(backend="eager")
    assert compilable_layers(nn.ModuleDict({"blocks": blocks})) == ("blocks.0",)
    cuda = torch.device("cuda")
    assert is_asked_for(ParallelOptions(device=cuda, compile="auto"))
    assert not is_asked_for(ParallelOptions(device=cuda, compile="auto", **FLOAT64))
    assert not is_asked_for(ParallelOptions(device=cuda, compile="auto", kernels="plain"))
    assert not is_asked_for(ParallelOptions(compile="auto"))
    assert not is_asked_for(ParallelOptions(device=cuda)), "off by default"
    assert is_asked_for(ParallelOptions(compile="on"))
    with pytest.raises(ValueError, match="compile=yes"):
        ParallelOptions(compile="yes")


def test_modules_of_a_class_get_one_derived_class() -> None:
    first, second = (derive_class(Block(), ForeignLayer) for _ in range(2))
    assert type(first) is type(second)
    assert type(first) is not type(derive_class(Block(), nn.Identity))
    assert F.linear(torch.ones(1, 8), first.linear.weight).shape == (1, 8)


@pytest.mark.soak
def test_the_default_backend() -> None:
    """Inductor, which needs a C++ compiler here."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    expected = train(Stack().double(), ROWS, "dp=1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        check_equal(train(Stack().double(), ROWS, "dp=1", compile="on"), expected)
