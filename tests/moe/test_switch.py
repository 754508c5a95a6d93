"""Switch's routing token by token, its loss, its first values, its jitter."""

import math

import numpy as np
import pytest
import torch

from echelon.moe.gates.switch import Switch
from tests.moe.reference import Array, Dense, accounted, best, gate, same, softmax, tokens


def reference(x: Array, w: Array, *, shake: Array, room: float = math.inf, alpha: float = 0.01) -> Dense:
    groups, length, _ = x.shape
    num = len(w)
    weights, loss = np.zeros((groups, length, num)), np.zeros(groups)
    for g in range(groups):
        count, f, p = np.zeros(num), np.zeros(num), np.zeros(num)
        for t in range(length):
            chances = softmax(w @ (x[g, t] * shake[g, t]))
            (expert,) = best(chances, 1)
            f[expert] += 1 / length
            p += chances / length
            if count[expert] < room:
                weights[g, t, expert] = chances[expert]
            count[expert] += 1
        loss[g] = alpha * num * sum(f * p)
    return weights, loss


@pytest.mark.parametrize("num", [1, 4, 7])
@pytest.mark.parametrize(("factor", "training"), [(1.25, True), (1.0, False), (0.5, True), (None, False)])
def test_equals_the_paper(num: int, factor: float | None, training: bool) -> None:
    made = gate("switch", 4, num, 1, seed=num, capacity_factor=factor, jitter=0.1).train(training)
    assert isinstance(made, Switch)
    shake = np.ones((2, 10, 4))
    if training:
        shake += 0.1 * (2 * made.noise.uniform(torch.zeros(2, 10, 4, dtype=torch.float64)).numpy() - 1)
        assert shake.min() >= 0.9
        assert shake.max() < 1.1
        assert shake.std() > 0.03
    room = math.inf if factor is None else math.ceil(factor * 10 / num)
    routing = same(made, tokens(2, 10, 4, num), lambda *a: reference(*a, shake=shake, room=room))
    accounted(routing)
    assert int(routing.load.sum()) == 20
    assert (int(routing.dropped) == 0) == (factor is None or (num == 1 and factor >= 1))


def test_capacity_overflow_is_exact_and_first_come() -> None:
    made = gate("switch", 2, 4, 1, capacity_factor=1.0).eval()
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[3.0, 0], [0, 3], [0, 0], [-1, 0]]))
    x = torch.tensor([[1.0, 0]] * 5 + [[0, 1.0]] * 3, dtype=torch.float64).unsqueeze(0)
    routing = made(x)
    assert routing.load.tolist() == [5, 3, 0, 0]
    assert routing.experts.tolist() == [0, 0, 4, 4, 4, 1, 1, 4]
    assert int(routing.dropped) == 4


def test_the_loss_of_even_use_is_its_coefficient() -> None:
    made = gate("switch", 4, 4, 1).eval()
    with torch.no_grad():
        made.weight.copy_(torch.eye(4) * 1e-3)
    loss = made(torch.eye(4, dtype=torch.float64).unsqueeze(0)).loss
    assert abs(float(loss.detach()) - 0.01) < 1e-6


def test_first_values_are_truncated_and_small() -> None:
    made = Switch(512, 64)
    std = math.sqrt(0.1 / 512)
    weight = made.weight.detach()
    assert float(weight.abs().max()) <= 2 * std
    assert abs(float(weight.std()) / (0.8796 * std) - 1) < 0.02
    assert made.initial("weight").std == std


def test_one_expert_per_token_alone() -> None:
    with pytest.raises(ValueError, match=r"gate Switch: a token has one expert \(k=2\)"):
        Switch(4, 4, 2)
