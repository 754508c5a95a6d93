"""Balance by a bias: it decides who is chosen, never the weight, and brings the load to rest."""

import math

import numpy as np
import pytest
import torch

from echelon.moe.gates.loss_free import LossFree
from echelon.parallel.init_weights import move_buffers
from tests.moe.reference import Array, Dense, accounted, best, gate, same, softmax, tokens


def reference(
    x: Array, w: Array, *, k: int, bias: Array, score: str = "sigmoid", normalise: bool = False, scale: float = 1.0
) -> Dense:
    groups, length, _ = x.shape
    weights = np.zeros((groups, length, len(w)))
    for g in range(groups):
        for t in range(length):
            logits = w @ x[g, t]
            s = softmax(logits) if score == "softmax" else np.array([1 / (1 + math.exp(-v)) for v in logits])
            chosen = best(s + bias, k)
            for e in chosen:
                weights[g, t, e] = scale * s[e] / (sum(s[chosen]) if normalise else 1)
    return weights, np.zeros(groups)


@pytest.mark.parametrize(("num", "k"), [(6, 2), (5, 1), (4, 4), (1, 1)])
@pytest.mark.parametrize(("score", "normalise", "scale"), [("sigmoid", False, 1.0), ("softmax", True, 2.5)])
def test_equals_the_paper(num: int, k: int, score: str, normalise: bool, scale: float) -> None:
    made = gate("loss-free", 4, num, k, seed=k, score=score, normalise=normalise, scale=scale)
    bias = np.random.default_rng(num).normal(size=num) * 0.3
    assert isinstance(made, LossFree)
    made.bias.copy_(torch.from_numpy(bias))
    options = {"k": k, "bias": bias, "score": score, "normalise": normalise, "scale": scale}
    routing = same(made, tokens(2, 8, 4, num), lambda *a: reference(*a, **options))
    accounted(routing)
    assert not routing.loss.any()


def test_an_update_is_a_step_towards_the_mean() -> None:
    made = LossFree(4, 4, 1)
    made.end_step(torch.tensor([5, 1, 3, 3]))
    assert made.bias.tolist() == pytest.approx([-0.001, 0.001, 0, 0])
    made.end_step(torch.tensor([0, 0, 0, 8]))
    assert made.bias.tolist() == pytest.approx([0, 0.002, 0.001, -0.001])


def test_updates_bring_the_load_to_rest() -> None:
    made, x = gate("loss-free", 4, 6, 2, speed=0.01), tokens(2, 200, 4, 3)
    assert isinstance(made, LossFree)
    first = made(x).load
    for _ in range(150):
        made.end_step(made(x).load)
    last = made(x).load
    assert int(first.max()) > 1.3 * 800 / 6
    assert int(last.max()) < 1.1 * 800 / 6


def test_the_bias_is_saved_and_not_trained() -> None:
    made = LossFree(4, 4, 1)
    assert set(made.state_dict()) == {"weight", "bias"}
    assert [name for name, _ in made.named_parameters()] == ["weight"]
    assert made.initial("bias").distribution == "zeros"
    assert not made.bias.requires_grad


def test_a_bias_stays_wide_in_a_model_of_16_bits() -> None:
    """It was of the compute type: above 0.5 steps of 0.001 changed nothing any more."""
    made = LossFree(4, 8, 2)
    move_buffers(made, torch.device("cpu"), torch.bfloat16)
    assert made.bias.dtype == torch.float32
    for _ in range(2000):
        made.end_step(torch.tensor([0] + [1] * 7))
    assert float(made.bias[0]) == pytest.approx(2.0, rel=1e-3)
    move_buffers(made, torch.device("cpu"), torch.float64)
    assert made.bias.dtype == torch.float64
