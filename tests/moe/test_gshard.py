"""GShard's algorithm 1, token by token."""

import math

import numpy as np
import pytest
import torch

from echelon.moe.gates.gshard import GShard
from tests.moe.reference import Array, Dense, accounted, best, dense, gate, same, softmax, tokens


def reference(
    x: Array, w: Array, *, drawn: Array, room: float = math.inf, order: str = "choices", balance: float = 0.01
) -> Dense:
    groups, length, _ = x.shape
    num = len(w)
    weights, loss = np.zeros((groups, length, num)), np.zeros(groups)
    for g in range(groups):
        gates = np.array([softmax(w @ x[g, t]) for t in range(length)])
        count, mean = np.zeros(num), gates.mean(0)
        pairs = [best(gates[t], 2) for t in range(length)]
        firsts = np.zeros(num)
        for e1, _ in pairs:
            firsts[e1] += 1
        loss[g] = balance / num * sum(firsts[e] / length * mean[e] for e in range(num))
        lines = [(t, 0) for t in range(length)] + [(t, 1) for t in range(length)]
        for t, which in sorted(lines) if order == "tokens" else lines:
            e1, e2 = pairs[t]
            total = gates[t, e1] + gates[t, e2]
            if which == 1 and not 2 * gates[t, e2] / total > drawn[g, t]:
                continue
            expert = pairs[t][which]
            if count[expert] < room:
                weights[g, t, expert] = gates[t, expert] / total
            count[expert] += 1
    return weights, loss


@pytest.mark.parametrize("num", [2, 5, 8])
@pytest.mark.parametrize(("factor", "order"), [(1.0, "choices"), (0.5, "choices"), (0.5, "tokens"), (None, "choices")])
def test_equals_the_paper(num: int, factor: float | None, order: str) -> None:
    made = gate("gshard", 4, num, 2, seed=num, capacity_factor=factor, order=order)
    assert isinstance(made, GShard)
    assert made.random is not None
    drawn = made.random.uniform(torch.zeros(2, 12, dtype=torch.float64)).numpy()
    room = math.inf if factor is None else math.ceil(factor * 2 * 12 / num)
    routing = same(made, tokens(2, 12, 4, num), lambda *a: reference(*a, drawn=drawn, room=room, order=order))
    accounted(routing)
    assert len(routing.experts) == 2 * 12 * 2
    assert factor == 1 or (int(routing.dropped) > 0) == (factor == 0.5)
    if factor is not None:
        kept = routing.experts.view(2, -1)
        assert max(int((kept == e).sum(1).max()) for e in range(num)) <= room


def test_second_choices_are_always_made_in_evaluation_and_where_asked() -> None:
    x, zeros = tokens(2, 12, 4, 1), np.zeros((2, 12))
    for made in (gate("gshard", 4, 5, 2).eval(), gate("gshard", 4, 5, 2, random_second=False)):
        routing = same(made, x, lambda *a: reference(*a, drawn=zeros, room=math.ceil(2 * 12 / 5)))
        assert int(routing.load.sum()) == 48
    assert int(gate("gshard", 4, 5, 2)(x).load.sum()) < 48


def test_a_second_choice_is_made_as_often_as_twice_its_weight() -> None:
    made, x = gate("gshard", 4, 5, 2, capacity_factor=None, groups=50), tokens(50, 100, 4, 2)
    values = made.scores(x)[..., :-1].softmax(-1).topk(2).values
    chance = 2 * values[..., 1] / values.sum(-1)
    made_ones = float((dense(made(x), 50) > 0).sum() - 5000)
    assert abs(made_ones - float(chance.detach().sum())) < 4 * float((chance * (1 - chance)).detach().sum() ** 0.5)


def test_capacity_overflow_is_exact() -> None:
    """Every token wants expert 0 first and expert 1 second."""
    made = gate("gshard", 2, 4, 2, random_second=False)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[3.0, 0], [2, 0], [0, 0], [-1, 0]]))
    routing = made(torch.ones(1, 8, 2, dtype=torch.float64))
    assert routing.load.tolist() == [8, 8, 0, 0]
    assert int(routing.dropped) == 8
    sent = [[0, 1]] * 4 + [[4, 4]] * 4
    assert routing.experts.view(8, 2).tolist() == sent


def test_only_two_experts_and_known_orders() -> None:
    with pytest.raises(ValueError, match=r"a token has two experts \(k=1\).*also order is not one of choices, tokens"):
        GShard(4, 4, 1, order="mixed")
    with pytest.raises(ValueError, match=r"k is not in 1 .. 1 \(k=2, num_experts=1\)"):
        GShard(4, 1)


def test_the_leak_is_the_orders() -> None:
    assert [
        GShard(4, 4, order=order, capacity_factor=factor).leaks_future
        for order, factor in (("choices", 1.0), ("tokens", 1.0), ("choices", None))
    ] == [True, False, False]
