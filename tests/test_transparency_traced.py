"""Modules that declare neither splits nor stages run under tp and pp as on one device: dropout masks, too."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import traced_modules
from tiny_engines import SGD, float64, largest_error, whole
from torch import Tensor, nn
from traced_modules import MODULES, build, words

import echelon as ec
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_failure import RankError
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.parallel.auto_sharding import shard_graph
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.engine_state import EngineCheckpointer
from echelon.verification.verifier import LayoutVerdict, Verifier
from echelon.verification.verify_case import VerifyCase

FILE = traced_modules.__file__
OFTEN = [
    ("gpt", "tp=2"),
    ("gpt", "dp=2,tp=2,zero=3"),
    ("gpt", "dp=2,tp=2,pp=2,zero=1"),
    ("llama", "tp=2,recompute=full"),
    ("two-tower", "tp=2,sp=0"),
    ("u-net", "pp=2,accumulate=2"),
    ("gpt", "pp=2,accumulate=4,schedule=zb-h1"),
]
LAYOUTS = (
    *("tp=2", "tp=4", "tp=2,sp=0", "dp=2,tp=2,zero=3", "pp=2,accumulate=2", "dp=2,tp=2,pp=2,zero=1"),
    *("tp=2,recompute=full", "pp=2,tp=2,accumulate=4,schedule=zb-h1"),
)
LEFT_OUT = [
    pytest.param("llama", "tp:all_gather", marks=pytest.mark.soak),
    ("gpt", "tp:reduce_scatter"),
    pytest.param("vit", "tp:all_reduce", marks=pytest.mark.soak),
    pytest.param("mixer", "tp:all_to_all", marks=pytest.mark.soak),
    pytest.param("u-net", "tp:all_gather", marks=pytest.mark.soak),
    ("two-tower", "tp:all_gather"),
]
"""thread ranks leave out every collective of each module (parallel/auto_sharding/test_sharded_runner.py)"""
SLOW_LOOP = pytest.param("dp=2,tp=2,zero=3", marks=pytest.mark.soak)
SLOW_PIPELINE = pytest.param("tp=2,pp=2,accumulate=2", marks=pytest.mark.soak)


def judge(pool: RankPool, name: str, layout: str, leave_out: str = "", steps: int = 2) -> LayoutVerdict:
    factory, batch = MODULES[name]
    case = VerifyCase(model=f"{FILE}:{factory.__name__}", batch_function=f"{FILE}:{batch.__name__}", steps=steps)
    verdict = Verifier(pool, case, leave_out).verify_layout(Layout.parse(layout))
    assert not verdict.trouble, verdict.trouble
    return verdict


@pytest.mark.parametrize(("name", "layout"), OFTEN)
def test_a_traced_module_computes_what_one_device_does(pool: RankPool, name: str, layout: str) -> None:
    verdict = judge(pool, name, layout)
    assert verdict.passed, verdict.first_difference
    assert verdict.max_error < 1e-10


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_every_traced_module_on_every_axis(pool: RankPool, name: str, layout: str) -> None:
    verdict = judge(pool, name, layout, steps=3)
    assert verdict.passed, verdict.first_difference


@pytest.mark.parametrize(("name", "leave_out"), LEFT_OUT)
def test_verify_detects_a_collective_that_a_derived_plan_lacks(pool: RankPool, name: str, leave_out: str) -> None:
    verdict = judge(pool, name, "tp=2", leave_out, steps=1)
    assert not verdict.passed
    assert verdict.axis == "tp"


# -- checkpoints ------------------------------------------------------------------------------------------------------

RULE = OptimizerConfig(name="adamw", lr=1e-2)


def run(layout: str, folder: str, first: int, last: int, save: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train GPT from a step to another, from a checkpoint if it is not the first."""
    torch.manual_seed(0)
    engine = Engine(traced_modules.PlainGPT(1).double(), layout, RULE, options=float64(), inputs=words(4))
    engine.model.train()
    saving = EngineCheckpointer(engine, folder)
    if first:
        saving.load(first)
    losses = [engine.step(words(4, step)).loss for step in range(first, last)]
    if save:
        saving.save({})
    saving.wait()
    values = whole(engine.parallel, "master")
    saving.close()
    engine.close()
    return losses, values


def test_a_checkpoint_of_a_traced_model_loads_on_any_layout(pool: RankPool, tmp_path: Path) -> None:
    """Names and shapes are logical: saved under tp=2, loaded by one device and by tp=4, whose slices differ."""
    pool.run(run, 2, "tp=2", str(tmp_path), 0, 2, True)
    losses, values = pool.run(run, 1, "dp=1", str(tmp_path), 2, 4, False)[0]
    assert {"blocks.0.qkv.weight", "embed.weight", "blocks.0.down.bias"} <= set(values)
    for found, state in pool.run(run, 4, "tp=4", str(tmp_path), 2, 4, False):
        assert found == pytest.approx(losses, abs=1e-10)
        assert largest_error(state, values) < 1e-10


# -- a loop of one's own ----------------------------------------------------------------------------------------------


def loop(layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """A user's loop; each rank of dp has its rows."""
    model, batch = build("two-tower")
    wrapped = ec.wrap(model, layout, inputs=batch(4, 0)) if layout else model
    optimizer, losses = torch.optim.AdamW(wrapped.parameters(), lr=1e-2), []
    mine = slice(None)
    if layout and Layout.parse(layout).dp > 1:
        index = wrapped._parallel.axes["dp"].index
        mine = slice(2 * index, 2 * index + 2)
    for step in range(3):
        total, count = wrapped(**{key: value[mine] for key, value in batch(4, step).items()})
        mean = wrapped.mean(total, count) if layout else total / count
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses, wrapped.full_state_dict() if layout else {k: v.detach() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("layout", ["tp=2", SLOW_LOOP])
def test_a_user_loop_equals_one_device(pool: RankPool, layout: str) -> None:
    expected, state = loop("")
    for losses, found in pool.run(loop, Layout.parse(layout).world, layout):
        assert losses == pytest.approx(expected, abs=1e-10)
        assert largest_error(found, state) < 1e-10


# -- other sizes, evaluation, low precision ---------------------------------------------------------------------------


def steps_of_sizes(layout: str) -> list[float]:
    """Losses of steps whose rows and sequences are others than those of the first batch."""
    torch.manual_seed(0)
    is_first = (dist.get_rank() if dist.is_initialized() else 0) % Layout.parse(layout).tp == 0
    with nullcontext() if is_first else patch.object(shard_graph, "solve", never):
        engine = Engine(traced_modules.PlainGPT(2).double(), layout, SGD, options=float64(), inputs=words(4))
        losses = []
        for rows, length in ((4, 16), (8, 10), (4, 7)):
            batch = {key: value[:, :length].contiguous() for key, value in words(rows, length).items()}
            engine.model.train()
            losses.append(engine.step(batch).loss)
        return [*losses, engine.evaluate(engine.microbatches(batch)) or 0.0]


def never(*_problem: object, **_options: object) -> None:
    raise AssertionError("only the first rank solves: after a time limit, others might find another sharding")


@pytest.mark.parametrize("layout", ["tp=2", SLOW_PIPELINE])
def test_steps_of_other_sizes_and_evaluation(pool: RankPool, layout: str) -> None:
    """Seven tokens divide by nothing: their graph gets strategies of its own, and parameters stay where they are.

    The first rank solves for all.
    """
    (expected,) = pool.run(steps_of_sizes, 1, "dp=1")
    for losses in pool.run(steps_of_sizes, Layout.parse(layout).world, layout):
        assert losses == pytest.approx(expected, abs=1e-10)


def bf16_losses(layout: str) -> list[float]:
    torch.manual_seed(0)
    options = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.float32)
    engine = Engine(traced_modules.PlainLlama(1), layout, SGD, options=options, inputs=words(4))
    engine.model.train()
    return [engine.step(words(4, step)).loss for step in range(3)]


def test_bfloat16_is_close(pool: RankPool) -> None:
    (expected,) = pool.run(bf16_losses, 1, "dp=1")
    for losses in pool.run(bf16_losses, 2, "tp=2"):
        assert losses == pytest.approx(expected, rel=2e-2)


# -- buffers that change ----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer that notes the mean of what it saw, and how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.calls += 1
        return x + self.linear(x - self.mean).tanh()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().cos().sum(), torch.tensor(len(x))


def buffers_of(layout: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = torch.randn(8, 8, dtype=torch.float64)
    engine = Engine(Counted().double(), layout, SGD, options=float64(), inputs={"x": rows})
    engine.model.train()
    losses = [engine.step({"x": rows + step}).loss for step in range(3)]
    return losses, {name: buffer.clone() for name, buffer in engine.model.named_buffers()}


@pytest.mark.parametrize("layout", ["tp=2,recompute=full", "pp=2,accumulate=4,recompute=full"])
def test_buffers_change_as_on_one_device(pool: RankPool, layout: str) -> None:
    accumulate = Layout.parse(layout).accumulate
    ((expected, state),) = pool.run(buffers_of, 1, f"dp=1,accumulate={accumulate}")
    seen = set()
    for losses, buffers in pool.run(buffers_of, 2, layout):
        assert losses == pytest.approx(expected, abs=1e-10)
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, state[name])
        seen |= set(buffers)
    assert seen == set(state)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(layout: str, name: str = "gpt", inputs: bool = True, **options: object) -> str:
    model, batch = build(name)
    with pytest.raises(ValueError, match=r".+") as caught:
        Engine(model, layout, SGD, options=float64(**options), inputs=batch(4, 0) if inputs else None)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("cp=2,tp=2", "cp=2 is incompatible with a model that runs from its traced graph (PlainGPT declares no split)"),
        ("dp=2,ep=2,tp=2", "ep=2"),
    ],
)
def test_context_and_expert_parallelism_are_refused(pool: RankPool, layout: str, words: str) -> None:
    for found in pool.run(refused, 4, layout):
        assert words in found


def test_settings_that_change_modules_are_refused(pool: RankPool) -> None:
    (first, _) = pool.run(refused, 2, "tp=2", matmul_precision="fp8")
    assert "incompatible with a model that runs from its traced graph (PlainGPT)" in first
    assert "declare `split` and `pipeline_model()`" in first


def test_without_inputs_the_refusal_says_what_to_give(pool: RankPool) -> None:
    (first, _) = pool.run(refused, 2, "tp=2", inputs=False)
    assert "tp > 1 requires inputs of the forward of PlainGPT" in first
    assert "give `inputs`, or a table" in first
    (first, _) = pool.run(refused, 2, "pp=2", inputs=False)
    assert "inputs" in first


def called_by_position() -> str:
    model, batch = build("gpt")
    wrapped = ec.wrap(model, "tp=2", inputs=batch(4, 0))
    with pytest.raises(ValueError, match="traced graph") as caught:
        wrapped(*batch(4, 0).values())
    return str(caught.value)


def test_calls_by_position_are_refused(pool: RankPool) -> None:
    for found in pool.run(called_by_position, 2):
        assert found == "PlainGPT runs from a traced graph; call it with keyword arguments"


def test_an_unreadable_forward_fails_on_every_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match="draws random numbers from torch's own generator"):
        pool.run(draws, 2)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(x) * torch.rand_like(x)).sum(), torch.tensor(len(x))


def draws() -> None:
    Engine(Drawing().double(), "tp=2", SGD, options=float64(), inputs={"x": torch.ones(4, 8, dtype=torch.float64)})
