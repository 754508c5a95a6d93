"""Backward in two halves gives what backward in one piece gives, and the first half leaves weights alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from devices import DEVICE
from tiny_engines import batch_of, tiny, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon import compat, models
from echelon.config.sections import OptimizerConfig
from echelon.kernels.gemm import fused_linear
from echelon.launch.rank_pool import RankPool
from echelon.parallel.parallel_options import ParallelOptions
from echelon.pipeline.execution import split_backward
from echelon.precision import fp8_linear
from echelon.training.engine import Engine


def layers():
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)),
        nn.LayerNorm(4),
        shared,
        nn.GELU(),
        shared,
    ).double()


def no_gemm(weights, compute):
    raise AssertionError("torch computes these linears")


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("wants_input", [True, False], ids=["input gradient", "no input gradient"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_input_and_weight_gradients_together_are_backward(wants_input, recompute):
    whole, halved = layers(), layers()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(wants_input) for _ in range(2)]
    whole(inputs[0]).square().sum().backward()
    later: list[split_backward.DeferredGrad] = []
    with split_backward.DeferWeightGrads(later):
        out = checkpoint(halved, inputs[1], use_reentrant=False) if recompute else halved(inputs[1])
        total = out.square().sum()
    with split_backward.DeferWeightGrads(later):
        split_backward.backward_inside_mode([total], [torch.ones_like(total)])
    weights = [name for name, grad in gradients(halved).items() if grad is None]
    assert len(later) == 4, "one product for every use of a weight"
    assert weights == [
        "0.weight",
        "1.parametrizations.weight.original0",
        "1.parametrizations.weight.original1",
        "3.weight",
    ]
    if wants_input:
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    split_backward.compute_weight_grads(
        later, lambda weight, left, right: torch.autograd.backward([weight], [left @ right]), no_gemm
    )
    assert not later
    expected = gradients(whole)
    for name, gradient in gradients(halved).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


def test_a_frozen_weight_is_left_alone():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    later: list[split_backward.DeferredGrad] = []
    with split_backward.DeferWeightGrads(later):
        layer(torch.ones(1, 2)).sum().backward()
    assert not later
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


# -- fp8 --------------------------------------------------------------------------------------------------------------

EMULATED = SimpleNamespace(use_triton=lambda x: True, autocast_enabled=lambda x: False)
"""linears in fp8 on a CPU too"""


@pytest.mark.parametrize("recipe", [fp8_linear.PerTensorFp8, fp8_linear.RowwiseFp8])
def test_fp8_linears_are_split(monkeypatch, recipe):
    """Both halves together are its backward bit for bit, and the gradient of the output is cast once, in the first."""
    monkeypatch.setattr(fused_linear, "dispatch", EMULATED)
    torch.manual_seed(0)
    layer = nn.Linear(32, 48).to(DEVICE).bfloat16()
    frozen = nn.Linear(48, 16).to(DEVICE).bfloat16().requires_grad_(False)
    for part in (layer, frozen):
        part.gemms = recipe()
    x, dy = (torch.randn(3, 5, size, device=DEVICE).bfloat16() for size in (32, 16))
    found = {}
    for way in ("whole", "halved"):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        later: list[split_backward.DeferredGrad] = []
        mode = split_backward.DeferWeightGrads(later) if way == "halved" else torch.enable_grad()
        with mode:
            y = fused_linear.project(fused_linear.project(given, layer), frozen)
            split_backward.backward_inside_mode([y], [dy])
        if way == "halved":
            assert layer.weight.grad is None
            assert [len(grad.weights) for grad in later] == [1]
            monkeypatch.setattr(fp8_linear, "cast_to_fp8", None)  # nothing is left to cast
            split_backward.compute_weight_grads(
                later, no_gemm, lambda weights, compute: torch.autograd.backward(weights, [compute(None)])
            )
        found[way] = (y, given.grad, layer.weight.grad.clone(), layer.bias.grad.clone())
    for halved, whole_ in zip(found["halved"], found["whole"], strict=True):
        assert torch.equal(halved, whole_)


def trained_in_fp8(layout: str, recipe: str) -> tuple[dict[str, torch.Tensor], int]:
    """On a rank: weights after two steps, and the casts of gradients."""
    shape, casts = tiny(layers=4, width=32, ffn=48, vocab=64), [0]
    cast = fp8_linear.cast_to_fp8

    def counted(x, dtype, **scales):
        casts[0] += len(scales) == 2 and all(scale is not None for scale in scales.values())
        return cast(x, dtype, **scales)

    def scaled_mm(left, right, left_scale, right_scale, dtype, out):
        """In plain torch: not every version multiplies rows with scales of their own on a CPU."""
        result = ((left.float() * left_scale) @ (right.float() * right_scale)).to(dtype)
        return result if out is None else out.copy_(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_linear, "check_fp8", lambda *_: None)
        patch.setattr(fp8_linear, "cast_to_fp8", counted)
        patch.setattr(fused_linear, "dispatch", EMULATED)
        patch.setattr(compat, "scaled_mm", scaled_mm)
        options = ParallelOptions(compute_dtype=torch.bfloat16, matmul_precision=recipe)
        rule = OptimizerConfig(name="sgd", lr=0.1)
        engine = Engine(models.build(shape, "meta"), layout, rule, options=options)
        engine.model.train()
        for step in range(2):
            engine.step(batch_of(shape, 4, 8, seed=step))
        return whole(engine.parallel, "master"), casts[0]


@pytest.mark.parametrize(
    ("recipe", "split"),
    [("fp8", "schedule=zb-h1"), ("fp8-row", "schedule=zb-v"), ("fp8", "schedule=dualpipe-v")],
)
def test_zero_bubble_schedules_compute_in_fp8(pool: RankPool, recipe: str, split: str) -> None:
    """As 1f1b does in fp8, bit for bit; and something else than bfloat16 does."""
    layout = "pp=2,accumulate=4"
    expected = pool.run(trained_in_fp8, 2, f"{layout},schedule=1f1b", recipe)
    plain = pool.run(trained_in_fp8, 2, f"{layout},schedule=1f1b", "same")[0][0]
    ranks = pool.run(trained_in_fp8, 2, f"{layout},{split}", recipe)
    values, truth = ranks[0][0], expected[0][0]
    assert all(torch.equal(values[name], truth[name]) for name in truth)
    assert any(not torch.equal(plain[name], truth[name]) for name in truth)
    assert sum(casts for _, casts in ranks) == sum(casts for _, casts in expected), "each operand is cast once"
