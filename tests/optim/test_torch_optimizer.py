"""The float32 update folds division and clipping into the fused kernel: equal to a plain loop that does them apart."""

import pytest
import torch

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.optim import cost
from echelon.optim.torch_rules import build_torch_optimizer
from echelon.training.engine import Engine

SHAPE = models.find_model("llama-tiny")


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(
    "rule",
    [OptimizerConfig(lr=1e-2), OptimizerConfig(name="sgd", lr=1e-1, momentum=0.9)],
    ids=lambda rule: rule.name,
)
def test_float32_steps_equal_a_plain_loop(rule, clip):
    engine = Engine(models.build(SHAPE, "meta"), "dp=1,accumulate=2", rule, clip=clip)
    plain = models.build(SHAPE, "cpu", seed=0)
    optimizer = build_torch_optimizer(rule, dict(plain.named_parameters()))
    source = torch.Generator().manual_seed(5)
    for _ in range(3):
        tokens = torch.randint(0, SHAPE.vocab, (4, 33), generator=source)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        result = engine.step(batch)
        optimizer.zero_grad()
        total, count = plain(**batch)
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        optimizer.step()
        assert result.norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.loss == pytest.approx((total / count).item(), rel=1e-5)
        wanted = dict(plain.named_parameters())
        for unit, piece in engine.parallel.sharded_model.pieces():
            name, shape = piece.param.name, piece.param.shape
            held = engine.parallel.sharded_model.piece_view(unit.grad, piece).view(shape)
            torch.testing.assert_close(held, wanted[name].grad, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(unit.parameters[name], wanted[name], rtol=1e-4, atol=1e-4)


def test_adamw_has_two_state_values_per_element():
    engine = Engine(models.build(SHAPE, "meta"), "dp=1", OptimizerConfig())
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    engine.step({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    held = sum(state.numel() * state.element_size() for state in engine.optimizer.states() if state.dim())
    assert held == 2 * 4 * SHAPE.parameters
    assert cost.rank_state_bytes(OptimizerConfig(), engine.parallel.placement) == held
    assert cost.rank_state_bytes(OptimizerConfig(name="sgd"), engine.parallel.placement) == 0


def test_moments_of_bfloat16_weights_are_counted_in_float32():
    """The weights have two bytes; values of the update have at least four."""
    rules = {"adamw": 2, "lamb": 2, "lion": 1, "muon": 1}
    counted = {name: cost.state_bytes(OptimizerConfig(name=name), (64, 63), master_bytes=2) for name in rules}
    assert counted == {name: values * 4 * 64 * 63 for name, values in rules.items()}
    assert cost.state_bytes(OptimizerConfig(name="sm3", momentum=0.0), (64, 63), master_bytes=2) == 4 * (64 + 63)
