"""bfloat16 with float32 masters in two halves, without a product of matrices: by hand, and in every layout."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import whole
from torch import Tensor, nn

from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.rules.adamw import FusedAdamW
from echelon.optim.rules.sgd import FusedSGD
from echelon.optim.torch_optimizer import TorchOptimizer
from echelon.optim.update_rule import resolve_betas, resolve_momentum
from echelon.parallel.dp.master_weights import SplitMasterWeights
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.logging.metrics import PeakFlops
from echelon.training.logging.resolved_settings import resolved_settings

STEPS, ROWS, WIDTH = 4, 8, 5
RULES = {
    "adamw": OptimizerConfig(lr=1e-2),
    "sgd": OptimizerConfig(name="sgd", lr=1e-1),
    "momentum": OptimizerConfig(name="sgd", lr=1e-1, momentum=0.9),
}


class Slope(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.sum(0) + self.bias[:, None] * x.sum()).sum()


class Slopes(nn.Module):
    """Every weight's gradient is a sum of inputs; no product of matrices, which not every CPU does in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slope(WIDTH, 3) for _ in range(2))
        self.frozen = nn.Parameter(torch.full((7,), 0.3), requires_grad=False)
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        total = (self.shift * x).sum()
        for layer in self.layers:
            total = total + layer(x)
        return (total * (valid.sum() > 0)).float(), valid.sum()


def build() -> Slopes:
    torch.manual_seed(0)
    return Slopes()


def batch(step: int) -> dict[str, Tensor]:
    """Small multiples of a power of two: sums of them are exact in every order and type."""
    x = torch.randint(-4, 5, (ROWS, WIDTH), generator=torch.Generator().manual_seed(step)) / 8
    return {"x": x, "valid": torch.full((ROWS,), float(step != 2))}


def engine_of(layout: str, rule: OptimizerConfig, compute: torch.dtype = torch.bfloat16) -> Engine:
    return Engine(build(), layout, rule, options=ParallelOptions(compute_dtype=compute))


def trained(layout: str, rule: OptimizerConfig, compute: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """On a rank: the master values after a few steps, of which the third has no target."""
    engine = engine_of(layout, rule, compute)
    for step in range(STEPS):
        engine.step(batch(step))
    for unit in engine.parallel.sharded_model.param_groups:
        unit.unshard()
        held = unit.master.values(slice(0, unit.spec.numel)).to(compute)
        if not unit.policy.num_shards > 1:
            assert torch.equal(unit.unsharded_param[: len(held)], held)
    return whole(engine.parallel, "master")


def by_hand(rule: OptimizerConfig) -> dict[str, Tensor]:
    """A float32 copy of every parameter beside the model, as everybody does it."""
    masters = {name: p.detach().clone() for name, p in build().named_parameters() if name != "frozen"}
    groups = [
        {"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": rule.weight_decay},
        {"params": [p for p in masters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=rule.lr, betas=resolve_betas(rule), eps=rule.eps)
        if rule.name == "adamw"
        else torch.optim.SGD(groups, lr=rule.lr, momentum=resolve_momentum(rule))
    )
    for step in range(STEPS):
        model = build().bfloat16()
        model.load_state_dict(masters, strict=False)
        inputs = {key: value.bfloat16() for key, value in batch(step).items()}
        total, count = model(**inputs)
        if not count:
            continue
        total.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                masters[name].grad = parameter.grad.float() / count
        optimizer.step()
    frozen = torch.full((7,), 0.3).bfloat16()  # never updated, so without a master
    return {**{name: value.detach().double() for name, value in masters.items()}, "frozen": frozen}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,accumulate=2"])
def test_split_master_weights_learn_as_unsplit_ones(pool: RankPool, layout: str, rule: str) -> None:
    wanted = by_hand(RULES[rule])
    for found in pool.run(trained, Layout.parse(layout).world, layout, RULES[rule]):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value.double(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_bfloat16_moments_are_rounded_alike_in_every_layout(pool: RankPool, compute: torch.dtype) -> None:
    rule = OptimizerConfig(lr=1e-2, states="bfloat16")
    (truth,) = pool.run(trained, 1, "dp=1", rule, compute)
    for layout in ("dp=1,accumulate=4", "dp=2", "dp=2,zero=1", "dp=4,zero=3"):
        world = Layout.parse(layout).world
        for found in pool.run(trained, world, layout, rule, compute):
            for name, value in truth.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=f"{layout}: {name}")
    (long,) = pool.run(trained, 1, "dp=1", OptimizerConfig(lr=1e-2), compute)
    assert any(not torch.equal(long[name], value) for name, value in truth.items())
    for name, value in truth.items():
        torch.testing.assert_close(value, long[name], rtol=0, atol=2e-3)


def test_a_step_without_targets_changes_nothing_in_the_optimizer() -> None:
    for rule in (*RULES.values(), OptimizerConfig(lr=1e-2, states="bfloat16")):
        engine = engine_of("dp=1", rule)
        engine.step(batch(0))
        before = [
            t.clone()
            for t in (
                *engine.optimizer.states(),
                *(u.master.values() for u in engine.parallel.sharded_model.param_groups),
            )
        ]
        assert engine.step(batch(2)).skipped
        after = [*engine.optimizer.states(), *(u.master.values() for u in engine.parallel.sharded_model.param_groups)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not engine.step(batch(1)).skipped


def test_which_optimizer_is_built_where() -> None:
    float64 = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    for compute, states, kind in (
        (torch.bfloat16, "float32", FusedAdamW),
        (torch.float32, "bfloat16", FusedAdamW),
        (torch.float32, "float32", TorchOptimizer),
    ):
        rule = OptimizerConfig(states=states)
        assert isinstance(build_optimizer(engine_of("dp=1", rule, compute).parallel, rule), kind)
    assert isinstance(engine_of("dp=1", RULES["sgd"]).optimizer, FusedSGD)
    assert isinstance(Engine(build(), "", RULES["sgd"], options=float64).optimizer, TorchOptimizer)


def types(layout: str) -> tuple[set[torch.dtype], bool]:
    engine = engine_of(layout, RULES["adamw"])
    units = engine.parallel.sharded_model.trainable_groups
    return {unit.grad.dtype for unit in units}, all(isinstance(unit.master, SplitMasterWeights) for unit in units)


@pytest.mark.parametrize(
    ("layout", "gradients"),
    [("dp=1", torch.bfloat16), ("dp=1,accumulate=2", torch.float32), ("dp=2,zero=3", torch.float32)],
)
def test_gradients_are_fp32_only_where_they_accumulate(pool: RankPool, layout: str, gradients: torch.dtype) -> None:
    for found, split in pool.run(types, Layout.parse(layout).world, layout):
        assert found == {gradients}
        assert split


@pytest.mark.parametrize(
    ("layout", "gradients", "why"),
    [("dp=1", "bfloat16", "gradients do not accumulate"), ("dp=1,accumulate=2", "float32", "gradients accumulate")],
)
def test_the_dtypes_in_force_are_printed(layout: str, gradients: str, why: str) -> None:
    engine = engine_of(layout, OptimizerConfig(states="bfloat16"))
    rows = resolved_settings(Config(batch=engine.layout.batch), engine, PeakFlops(flops=1.0, source=""), 1)
    reported = {name: f"{value} ({reason})" for name, value, reason in rows}
    assert f"gradients {gradients}" in reported["dtypes"]
    assert why in reported["dtypes"]
    assert "master float32 (split" in reported["dtypes"]
    assert reported["moments"].startswith("bfloat16 (stochastic rounding")


def test_lazy_gradients_live_from_backward_to_update() -> None:
    found = []
    for lazy in (False, True):
        engine = engine_of("dp=1", RULES["adamw"])
        units = engine.parallel.sharded_model.trainable_groups
        for unit in units:
            unit.grads.lazy = lazy
            unit.free_grads()
        for step in range(STEPS):
            engine.step(batch(step))
            assert all((unit.grads.tensor is None) == lazy for unit in units)
        assert float(engine.grad_norm()) == 0.0 if lazy else float(engine.grad_norm()) > 0.0
        found.append(whole(engine.parallel, "master"))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
