"""Noisy top-k gating against the paper's formulas, one token at a time."""

import math

import numpy as np
import pytest
import torch

from echelon.moe.gates.noisy_top_k import NoisyTopK
from tests.moe.reference import Array, Dense, accounted, below, best, cv_squared, gate, same, softmax, softplus, tokens


def reference(
    x: Array, wg: Array, wn: Array, *, k: int, noise: Array, w_importance: float = 0.1, w_load: float = 0.1
) -> Dense:
    groups, length, _ = x.shape
    num = len(wg)
    weights, loss = np.zeros((groups, length, num)), np.zeros(groups)
    for g in range(groups):
        load = np.zeros(num)
        for t in range(length):
            clean = wg @ x[g, t]
            spans = np.array([softplus(v) for v in wn @ x[g, t]])
            h = clean + noise[g, t] * spans
            chosen = best(h, k)
            weights[g, t, chosen] = softmax(h[chosen])
            for i in range(num):
                others = np.delete(h, i)
                kth = sorted(others)[-k] if k < num else -math.inf
                load[i] += below((clean[i] - kth) / spans[i])
        loss[g] = w_importance * cv_squared(weights[g].sum(0)) + w_load * cv_squared(load)
    return weights, loss


@pytest.mark.parametrize(("num", "k"), [(6, 2), (5, 1), (4, 3), (4, 4), (1, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_paper(num: int, k: int, training: bool) -> None:
    made, x = gate("noisy-top-k", 4, num, k, seed=num), tokens(2, 7, 4, k)
    made.train(training)
    assert isinstance(made, NoisyTopK)
    noise = made.noise.normal(torch.zeros(2, 7, num, dtype=torch.float64)) if training else torch.zeros(2, 7, num)
    routing = same(made, x, lambda *a: reference(*a, k=k, noise=noise.numpy()), ("weight", "noise_weight"))
    accounted(routing)
    assert int(routing.load.sum()) == 2 * 7 * k
    assert int(routing.dropped) == 0


def test_coefficients_are_their_own() -> None:
    x = tokens(2, 7, 4, 0)
    for options in ({"w_importance": 0.7, "w_load": 0.0}, {"w_importance": 0.0, "w_load": 0.3}):
        made = gate("noisy-top-k", 4, 6, 2, **options).eval()
        expected = reference(
            x.numpy(),
            made.weight.detach().numpy(),
            made.noise_weight.detach().numpy(),  # type: ignore[union-attr]
            k=2,
            noise=np.zeros((2, 7, 6)),
            **options,
        )
        np.testing.assert_allclose(made(x).loss.detach().numpy(), expected[1], rtol=1e-12)


def test_starts_from_zero_where_noise_alone_decides() -> None:
    made = NoisyTopK(4, 6, 2)
    x = torch.randn(3, 50, 4)
    assert all(not p.any() for p in made.parameters())
    assert made(x).load.min() > 10
    assert made.eval()(x).load.tolist() == [150, 150, 0, 0, 0, 0]


def test_the_loss_falls_where_load_becomes_even() -> None:
    """A few steps on the losses alone: what they are for."""
    made = gate("noisy-top-k", 4, 6, 2).eval()
    x, routers = tokens(2, 40, 4, 3), list(made.parameters())
    before = made(x)
    for _ in range(30):
        slopes = torch.autograd.grad(made(x).loss.sum(), routers)
        with torch.no_grad():
            for router, slope in zip(routers, slopes, strict=True):
                router -= 0.5 * slope
    after = made(x)
    assert float(after.loss.sum().detach()) < 0.7 * float(before.loss.sum().detach())
    assert int(after.load.max()) < int(before.load.max())


def test_noise_that_vanishes_is_not_divided_by() -> None:
    made = gate("noisy-top-k", 4, 6, 2).float()
    with torch.no_grad():
        made.weight.mul_(0)
        made.noise_weight.fill_(-1e4)  # type: ignore[union-attr, operator]
    x = torch.rand(2, 7, 4, requires_grad=True)
    routing = made(x)
    (routing.loss.sum() + routing.weights.sum()).backward()
    assert bool(routing.loss.isfinite().all())
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
