"""Plain top-k gating: Mixtral's and Qwen's weights and losses, with and without a capacity."""

import math

import numpy as np
import pytest
import torch

from tests.moe.reference import Array, Dense, accounted, best, gate, same, softmax, tokens


def reference(
    x: Array, w: Array, *, k: int, balance: float, normalise: bool, room: float = math.inf, score: str = "softmax"
) -> Dense:
    groups, length, _ = x.shape
    num = len(w)
    weights, loss = np.zeros((groups, length, num)), np.zeros(groups)
    for g in range(groups):
        count, f, p = np.zeros(num), np.zeros(num), np.zeros(num)
        for t in range(length):
            logits = w @ x[g, t]
            s = softmax(logits) if score == "softmax" else np.array([1 / (1 + math.exp(-v)) for v in logits])
            p += s / sum(s) / length
            chosen = best(s, k)
            for e in chosen:
                f[e] += 1 / length
                if count[e] < room:
                    weights[g, t, e] = s[e] / (sum(s[chosen]) if normalise else 1)
                count[e] += 1
        loss[g] = balance * num * sum(f * p)
    return weights, loss


@pytest.mark.parametrize(("num", "k"), [(6, 2), (5, 1), (4, 4), (1, 1)])
@pytest.mark.parametrize(("name", "balance", "normalise"), [("mixtral", 0.02, True), ("qwen", 0.001, False)])
def test_equals_its_formulas(name: str, balance: float, normalise: bool, num: int, k: int) -> None:
    made = gate(name, 4, num, k, seed=k)
    routing = same(made, tokens(2, 8, 4, num), lambda *a: reference(*a, k=k, balance=balance, normalise=normalise))
    accounted(routing)
    assert int(routing.load.sum()) == 2 * 8 * k


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_capacity_and_sigmoid(score: str) -> None:
    made = gate("mixtral", 4, 6, 2, capacity_factor=0.5, score=score, balance=1.0)
    room = math.ceil(0.5 * 2 * 10 / 6)
    routing = same(
        made,
        tokens(2, 10, 4, 5),
        lambda *a: reference(*a, k=2, balance=1.0, normalise=True, room=room, score=score),
    )
    accounted(routing)
    assert int(routing.dropped) > 0


def test_mixtral_is_the_softmax_of_the_largest_logits() -> None:
    made, x = gate("mixtral", 4, 6, 3), tokens(2, 8, 4, 7)
    logits = made.scores(x)
    assert torch.allclose(made(x).weights.view(2, 8, 3), logits.topk(3).values.softmax(-1))


def test_unknown_score_is_refused() -> None:
    with pytest.raises(ValueError, match=r"score is not one of softmax, sigmoid \(score=tanh\)"):
        gate("mixtral", 4, 6, 2, score="tanh")
