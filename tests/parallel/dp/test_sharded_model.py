"""Flat units under models that no transformer is: idle and frozen parameters, modules called twice, any units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.placement import Piece
from echelon.models import model_config
from echelon.optim.flat_segments import build_flat_segments
from echelon.optim.update_rule import resolve_betas
from echelon.training.engine import Engine, ParallelOptions
from echelon.verification.verify_case import VerifyCase

RULE = OptimizerConfig(lr=1e-2)
WIDTH, ROWS, STEPS = 8, 12, 3
LAYOUTS = ("dp=1", "dp=2", "dp=2,zero=1", "dp=3,zero=2,accumulate=2", "dp=2,zero=3,accumulate=2", "dp=4,shard=2")


class Net(nn.Module):
    """Small enough to read; `forward` returns (loss sum, count)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().sum(), torch.tensor(len(x))


class Twice(Net):
    """Blocks are called again, in another order."""

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        for index in (0, 1, 0, 2, 1):
            x = x + self.blocks[index](x)
        return self.head(x).square().sum(), torch.tensor(len(x))


class Idle(Net):
    """Each row goes through one block, so that ranks call different modules; the last block is never called."""

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        rows = [row + self.blocks[int(which)](row) for row, which in zip(x, kind, strict=True)]
        return self.head(torch.stack(rows)).square().sum(), torch.tensor(len(x))


class IdleInside(Net):
    """Each row goes through one expert of each block: all ranks call the same units and use different parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({str(key): nn.Linear(WIDTH, WIDTH) for key in range(3)})

        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            rows = [torch.tanh(self.experts[str(int(which))](row)) for row, which in zip(x, kind, strict=True)]
            return torch.stack(rows)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x, kind)
        return self.head(x).square().sum(), torch.tensor(len(x))


class Frozen(Net):
    """Frozen weights before, between and inside trained ones, and one block frozen altogether."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = not name.startswith(("blocks.0.2", "blocks.1", "blocks.2.0"))


class FrozenHead(Net):
    """What is frozen lies behind everything that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class Checkpointed(Net):
    """The user's own recomputation, around a unit and inside another."""

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x).square().sum(), torch.tensor(len(x))


class Borrowed(Net):
    """Large weights outside the layers, used without calling their module, as a tied head often is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x) @ self.embed.weight
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embed.weight).square().sum(), torch.tensor(len(x))


class Structured(Net):
    """Modules that return dicts and tuples with an unused tensor."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"out": (x + torch.tanh(self.main(x)), "text"), "side": self.side(x)}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)["out"][0]
        return self.head(x).square().sum(), torch.tensor(len(x))


def build(kind: type[Net]) -> Net:
    torch.manual_seed(7)
    return kind().double()


def batch(step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=source, dtype=torch.float64)
    # Three rows at a time: on dp=2 and dp=4 one rank's rows are all of one kind, with accumulate=2 too.
    return {"x": x, "kind": torch.arange(ROWS) // 3 % 2}


@dataclass(frozen=True)
class Outcome:
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    pieces: tuple[tuple[Piece, Tensor], ...]


def train(kind: type[Net], layout: str, **choices: Any) -> Outcome:
    """On a rank: a few steps; the values it owns."""
    options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64, **choices)
    engine = Engine(build(kind), layout, RULE, clip=1.0, options=options)
    results = [engine.step(batch(step)) for step in range(STEPS)]
    parallel = engine.parallel
    own = [
        (piece, parallel.sharded_model.piece_view(unit.master.values(), piece).clone())
        for unit, piece in parallel.sharded_model.pieces()
        if piece.is_owner and piece.is_first_replica
    ]
    return Outcome(tuple(r.loss for r in results), tuple(r.norm for r in results), tuple(own))


def plain(kind: type[Net]) -> tuple[list[float], dict[str, Tensor]]:
    """The same in a plain loop. What has no gradient counts as zero, in every layout alike."""
    model, losses = build(kind), []
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": RULE.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RULE.lr, betas=resolve_betas(RULE), eps=RULE.eps)
    for step in range(STEPS):
        for p in trained:
            p.grad = torch.zeros_like(p)
        total, count = model(**batch(step))
        (total / count).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses, dict(model.named_parameters())


def assemble(outcomes: list[Outcome], like: dict[str, Tensor]) -> dict[str, Tensor]:
    whole = {name: torch.full_like(value, float("nan")) for name, value in like.items()}
    for outcome in outcomes:
        for piece, values in outcome.pieces:
            whole[piece.param.name].view(-1)[piece.start : piece.stop] = values
    return whole


def check(pool: RankPool, kind: type[Net], layout: str, **choices: Any) -> list[Outcome]:
    losses, parameters = plain(kind)
    outcomes = pool.run(train, Layout.parse(layout).world, kind, layout, **choices)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(losses, rel=1e-10)
    for name, value in assemble(outcomes, parameters).items():
        torch.testing.assert_close(value, parameters[name].detach(), rtol=1e-10, atol=1e-10, msg=name)
    return outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Net, Twice, IdleInside, Frozen, FrozenHead, Checkpointed, Borrowed, Structured])
def test_equals_a_plain_loop(pool: RankPool, kind: type[Net], layout: str) -> None:
    check(pool, kind, layout)


@pytest.mark.parametrize(
    "layout",
    ["dp=2,accumulate=2", "dp=4,zero=1", "dp=2,zero=2,accumulate=2", "dp=4,shard=2,zero=1", "dp=4,shard=2,zero=2"],
)
def test_ranks_may_call_different_modules_below_zero_3(pool: RankPool, layout: str) -> None:
    check(pool, Idle, layout)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2", "dp=2,zero=3"])
def test_frozen_parameters_keep_every_bit(pool: RankPool, layout: str) -> None:
    first = dict(build(Frozen).named_parameters())
    last = assemble(pool.run(train, 2, Frozen, layout), first)
    for name, value in first.items():
        assert torch.equal(last[name], value) == (not value.requires_grad), name


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("kind", [Net, Twice, Frozen])
def test_prefetch_and_resharding_change_no_number(
    pool: RankPool, kind: type[Net], prefetch: int, reshard: bool
) -> None:
    check(pool, kind, "dp=2,zero=3,accumulate=2", prefetch=prefetch, reshard_after_forward=reshard)


UNITS: dict[str, tuple[str, ...]] = {
    "every linear": ("blocks.*.0", "blocks.*.2", "head"),
    "a block": ("blocks.1",),
    "out of order": ("head", "blocks.2", "blocks.0"),
}


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3", "dp=2,zero=3,recompute=full"])
def test_any_modules_may_form_param_groups(pool: RankPool, layout: str, units: str) -> None:
    check(pool, Net, layout, units=UNITS[units], prefetch=2)


def train_language(layout: str, units: tuple[str, ...]) -> list[float]:
    """On a rank: the losses of a transformer with dropout whose units lie inside the layers that are recomputed."""
    shape = replace(model_config.find_model("gpt-tiny"), layers=2, width=32, ffn=48, max_seq_len=64, dropout=0.1)
    options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64, units=units)
    parsed = Layout.parse(layout)
    engine = Engine(models.build(shape, "meta", dtype=torch.float64), parsed, RULE, options=options)
    case = VerifyCase(model=shape)
    return [engine.step(case.batch(step, 4)).loss for step in range(STEPS)]


def test_groups_inside_a_recomputed_layer_are_unsharded_in_backward(pool: RankPool) -> None:
    inside = ("blocks.*.attn", "blocks.*.mlp")
    [expected] = pool.run(train_language, 1, "dp=1,microbatch=4", ())
    for losses in pool.run(train_language, 2, "dp=2,zero=3,microbatch=2,recompute=full", inside):
        assert losses == pytest.approx(expected, rel=1e-10)


def num_elements(kind: type[Net], layout: str) -> int:
    """On a rank: how many elements its optimizer updates."""
    engine = Engine(
        build(kind), layout, RULE, options=ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    )
    return sum(run.size for run in build_flat_segments(engine.parallel, RULE))


class Tiny(Net):
    """Fewer elements than ranks: some ranks hold nothing but padding."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(x[:, :3] * self.scale).sum(), torch.tensor(len(x))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_may_hold_no_element(pool: RankPool, zero: int) -> None:
    check(pool, Tiny, f"dp=4,zero={zero}")
    assert pool.run(num_elements, 4, Tiny, f"dp=4,zero={zero}") == [1, 1, 1, 0]


def order_of_reductions(layout: str) -> list[tuple[str, str]]:
    """(collective, axis) of a step's gradients, as a rank launched them."""
    engine = Engine(Net(), layout, RULE, options=ParallelOptions())
    engine.step({"x": torch.ones(4, WIDTH), "kind": torch.zeros(4)}).wait()
    entries = sorted(engine.recorder.entries(), key=lambda entry: entry.order)
    return [(entry.op, entry.axis) for entry in entries if entry.phase == "backward" and entry.op != "all_gather"]


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_reduce_a_group_while_the_next_one_is_scattered(pool: RankPool, zero: int) -> None:
    """One group behind, and not all at the end of backward, where nothing overlaps them."""
    for found in pool.run(order_of_reductions, 4, f"dp=4,shard=2,zero={zero}"):
        scattered = [index for index, (op, _) in enumerate(found) if op == "reduce_scatter"]
        reduced = [index for index, one in enumerate(found) if one == ("all_reduce", "replica")]
        assert len(scattered) == len(reduced) > 2
        assert all(all_reduce < scatter for all_reduce, scatter in zip(reduced, scattered[2:], strict=False))
