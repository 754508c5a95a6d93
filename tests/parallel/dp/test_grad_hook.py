"""Gradients that a function writes straight into their place: the same step as plain autograd, in every layout."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import echelon as ec
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

WIDTH, ROWS, STEPS = 6, 12, 3
RULE = OptimizerConfig(lr=1e-2)


class _Beside(Function):
    """x times matrices that read the same input; their gradients go home by themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights = weights
        return x @ torch.cat(weights).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (dy,) = ctx.saved_tensors, gradients
        places: list[bool] = Direct.places

        def product(place: Tensor | None) -> Tensor:
            places.append(place is not None)
            return dy.t() @ x if place is None else torch.mm(dy.t(), x, out=place)

        home: Any = ctx.weights[0].grad_hook
        home.receive(ctx.weights, product)
        return dy @ torch.cat(ctx.weights), *(None for _ in ctx.weights)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=False) for size in (4, 2, 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.o = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(torch.tanh(self.beside(self.norm(x))))

    def beside(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in (self.q, self.k, self.v)], -1)


class Plain(nn.Module):
    """A tied embedding, a block that is called twice, and one whose k is frozen."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.blocks[2].k.weight.requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for index in (0, 1, 0, 2):
            x = self.blocks[index](x)
        return F.cross_entropy(self.head(x), targets, reduction="sum"), torch.tensor(len(ids))

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight)


class DirectBlock(Block):
    def beside(self, x: Tensor) -> Tensor:
        out: Tensor = _Beside.apply(x, self.q.weight, self.k.weight, self.v.weight)
        return out


class Direct(Plain):
    """The same, with gradients of q, k, v and of the head that go home by themselves."""

    block = DirectBlock
    places: list[bool] = []  # noqa: RUF012
    """of every product, whether it was given its place"""

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = _Beside.apply(x, self.embed.weight)
        return out


def build(kind: type[Plain]) -> Plain:
    torch.manual_seed(3)
    return kind().double()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (ROWS, 2), generator=torch.Generator().manual_seed(step))
    return {"ids": ids[:, 0], "targets": ids[:, 1]}


def train(kind: type[Plain], layout: str, lazy: bool = False) -> tuple[list[float], list[Tensor], list[bool]]:
    """On a rank: losses and norms, the shards, which products were made in place."""
    Direct.places.clear()
    options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    engine = Engine(build(kind), layout, RULE, clip=1.0, options=options)
    for unit in engine.parallel.sharded_model.param_groups:
        if lazy:
            unit.grads.lazy = True
            unit.free_grads()
    reported = []
    for step in range(STEPS):
        result = engine.step(batch(step))
        reported += [result.loss, result.norm]
        assert all((unit.grads.tensor is None) or not lazy for unit in engine.parallel.sharded_model.param_groups)
    shards = [unit.master.values().clone() for unit in engine.parallel.sharded_model.param_groups]
    return reported, shards, list(Direct.places)


LAYOUTS = [
    *(f"dp=1,accumulate={accumulate}" for accumulate in (1, 2)),
    *(f"dp=2,zero={zero},accumulate={accumulate}" for zero in range(4) for accumulate in (1, 2)),
    "dp=1,recompute=full",
    "dp=2,zero=3,recompute=full",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_plain_autograd(pool: RankPool, layout: str) -> None:
    world = Layout.parse(layout).world
    for lazy in (False, True):
        both = zip(pool.run(train, world, Plain, layout), pool.run(train, world, Direct, layout, lazy), strict=True)
        for (reported, shards, _), (reported_too, shards_too, places) in both:
            assert reported_too == pytest.approx(reported, rel=1e-12)
            for shard, other in zip(shards, shards_too, strict=True):
                torch.testing.assert_close(other, shard, rtol=1e-10, atol=1e-12)
            # The first of a step is made in place: not a block's second call, and not where k has no place.
            assert any(places)
            assert not all(places)


def test_the_first_gradient_of_a_step_is_written_into_the_buffer() -> None:
    _, _, places = train(Direct, "dp=1")
    head, last, twice, once, again = places[:5]
    assert (head, last, twice, once, again) == (True, False, True, True, False)


def test_versions_grow_when_values_change() -> None:
    engine = Engine(
        build(Direct), "dp=1", RULE, options=ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    )
    home = engine.model.embed.weight.grad_hook
    before = home.version
    engine.step(batch(0))
    assert home.version > before
    assert not hasattr(engine.model.blocks[2].k.weight, "grad_hook"), "a frozen parameter has no gradient hook"


def test_a_model_outlives_its_engine() -> None:
    """Homes do not keep the units; without them gradients are where autograd puts them."""
    engine = Engine(
        build(Direct), "dp=1", RULE, options=ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    )
    engine.step(batch(0))
    model, gone = engine.model, weakref.ref(engine.parallel.sharded_model)
    del engine
    gc.collect()
    assert gone() is None
    other = build(Plain)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        each(**batch(1))[0].backward()
    for (name, found), (_, wanted) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if wanted.requires_grad:
            torch.testing.assert_close(found.grad, wanted.grad, msg=name)
    assert model.embed.weight.grad_hook.version == -1


def wrapped(kind: type[Plain], layout: str) -> dict[str, Tensor]:
    model = ec.wrap(build(kind), layout)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        total, count = model(**batch(step))
        (total / count).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=2,zero=3"])
def test_in_a_user_loop(pool: RankPool, layout: str) -> None:
    world = Layout.parse(layout).world
    for plain, direct in zip(*(pool.run(wrapped, world, kind, layout) for kind in (Plain, Direct)), strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(direct[name], value, rtol=1e-10, atol=1e-12)


def test_a_model_with_grad_hooks_can_be_saved_and_copied() -> None:
    engine = Engine(nn.Sequential(nn.Linear(3, 2)), "")
    parameter = next(engine.model.parameters())
    assert parameter.grad_hook is not None
    again = pickle.loads(pickle.dumps(parameter))
    assert torch.equal(again, parameter)
    assert getattr(again, "grad_hook", None) is None
    assert getattr(next(copy.deepcopy(engine.model).parameters()), "grad_hook", None) is None
