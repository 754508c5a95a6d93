"""Expert choice: each expert's best tokens of the group, for the paper's capacity factors."""

import numpy as np
import pytest
import torch

from echelon.moe.gates.expert_choice import ExpertChoice
from tests.moe.reference import Array, Dense, accounted, best, gate, same, softmax, tokens


def reference(x: Array, w: Array, *, taken: int) -> Dense:
    groups, length, _ = x.shape
    weights = np.zeros((groups, length, len(w)))
    for g in range(groups):
        s = np.array([softmax(w @ x[g, t]) for t in range(length)])
        for e in range(len(w)):
            for t in best(s[:, e], taken):
                weights[g, t, e] = s[t, e]
    return weights, np.zeros(groups)


@pytest.mark.parametrize(
    ("num", "c", "taken"), [(4, 2, 6), (4, 1, 3), (4, 0.5, 1), (5, 2, 4), (1, 1, 12), (3, 3, 12), (13, 1, 1)]
)
def test_equals_the_paper(num: int, c: float, taken: int) -> None:
    made = gate("expert-choice", 3, num, c, seed=num)
    routing = same(made, tokens(2, 12, 3, num), lambda *a: reference(*a, taken=taken))
    accounted(routing)
    assert len(routing.experts) == 2 * num * taken
    assert routing.load.tolist() == [2 * taken] * num
    assert int(routing.dropped) == 0


def test_a_token_that_comes_first_wins_a_tie() -> None:
    made = gate("expert-choice", 3, 4, 1, seed=1)
    routing = made(torch.ones(1, 8, 3, dtype=torch.float64))
    assert routing.tokens.view(4, 2).tolist() == [[0, 1]] * 4


def test_rounding_of_the_share_is_exact() -> None:
    assert ExpertChoice(4, 10, 0.7).expert_capacity(100) == 7
    assert ExpertChoice(4, 8, 2.0).expert_capacity(33) == 8


@pytest.mark.parametrize("c", [0, -1, 5])
def test_refuses(c: float) -> None:
    with pytest.raises(ValueError, match=rf"k is not above 0 and at most 4, the experts \(k={c}\)"):
        ExpertChoice(4, 4, c)
