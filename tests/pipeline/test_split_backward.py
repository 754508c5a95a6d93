"""Backward in two halves gives what backward in one piece gives, and the first half leaves weights alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon.pipeline.execution import split_backward


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


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("wants_input", [True, False], ids=["input gradient", "no input gradient"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_input_and_weight_gradients_together_are_backward(wants_input, recompute):
    whole, halved = layers(), layers()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(wants_input) for _ in range(2)]
    whole(inputs[0]).square().sum().backward()
    later: list[split_backward.WeightGradInputs] = []
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
        later, lambda weight, left, right: torch.autograd.backward([weight], [left @ right])
    )
    assert not later
    expected = gradients(whole)
    for name, gradient in gradients(halved).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


def test_a_frozen_weight_is_left_alone():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    later: list[split_backward.WeightGradInputs] = []
    with split_backward.DeferWeightGrads(later):
        layer(torch.ones(1, 2)).sum().backward()
    assert not later
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
