"""Two-level gating against the paper's formulas, one token at a time."""

import math

import numpy as np
import pytest
import torch

from echelon.moe import most_square_divisor
from echelon.moe.gates.noisy_top_k import Hierarchical
from tests.moe.reference import Array, Dense, accounted, below, best, cv_squared, gate, same, softmax, softplus, tokens

ROUTERS = ("weight", "noise_weight", "group_weight", "group_noise_weight")


def level(clean: Array, raw: Array, noise: Array, k: int) -> tuple[Array, Array]:
    """(G, P) of one gate for one token."""
    spans = np.array([softplus(v) for v in raw])
    h = clean + noise * spans
    gates, chance = np.zeros(len(h)), np.zeros(len(h))
    chosen = best(h, k)
    gates[chosen] = softmax(h[chosen])
    for i in range(len(h)):
        kth = sorted(np.delete(h, i))[-k] if k < len(h) else -math.inf
        chance[i] = below((clean[i] - kth) / spans[i])
    return gates, chance


def reference(
    x: Array, w: Array, wn: Array, gw: Array, gwn: Array, *, k_groups: int, inside: int, noise: Array
) -> Dense:
    groups, length, _ = x.shape
    a, b = len(gw), len(w) // len(gw)
    weights, loss = np.zeros((groups, length, a * b)), np.zeros(groups)
    for g in range(groups):
        load_primary, load_inside, members = np.zeros(a), np.zeros((a, b)), np.zeros(a)
        for t in range(length):
            primary, chance = level(gw @ x[g, t], gwn @ x[g, t], noise[g, t, :a], k_groups)
            load_primary += chance
            for i in range(a):
                rows = slice(i * b, i * b + b)
                ours, chance = level(w[rows] @ x[g, t], wn[rows] @ x[g, t], noise[g, t, a:][rows], inside)
                weights[g, t, rows] = primary[i] * ours
                if primary[i] > 0:
                    members[i] += 1
                    load_inside[i] += chance
        load = np.zeros((a, b))
        for i in range(a):
            if members[i]:
                load[i] = load_primary[i] * load_inside[i] / members[i]
        loss[g] = 0.1 * cv_squared(weights[g].sum(0)) + 0.1 * cv_squared(load.ravel())
    return weights, loss


@pytest.mark.parametrize(
    ("num", "k", "num_groups", "k_groups"),
    [(6, 4, 3, 2), (6, 2, 2, 1), (8, 2, 4, 2), (4, 4, 2, 2), (3, 3, 3, 3), (1, 1, 1, 1)],
)
def test_equals_the_paper(num: int, k: int, num_groups: int, k_groups: int) -> None:
    made = gate("hierarchical", 3, num, k, seed=num, num_groups=num_groups, k_groups=k_groups)
    assert isinstance(made, Hierarchical)
    noise = made.noise.normal(torch.zeros(2, 6, num_groups + num, dtype=torch.float64)).numpy()
    routing = same(
        made,
        tokens(2, 6, 3, k),
        lambda *a: reference(*a, k_groups=k_groups, inside=k // k_groups, noise=noise),
        ROUTERS,
    )
    accounted(routing)
    assert int(routing.load.sum()) == 2 * 6 * k
    if num > 1:
        assert torch.allclose(routing.weights.view(-1, k).sum(1), torch.ones(12, dtype=torch.float64))


def test_a_group_without_tokens_has_no_load() -> None:
    made, x = gate("hierarchical", 3, 6, 2, num_groups=3, k_groups=1).eval(), tokens(1, 4, 3, 0)
    x[..., 0] = 1
    with torch.no_grad():
        made.group_weight.copy_(torch.tensor([[9.0, 0, 0], [0, 1, 0], [0, 0, 1]]))  # type: ignore[operator, union-attr]
    routing = same(made, x, lambda *a: reference(*a, k_groups=1, inside=2, noise=np.zeros((1, 4, 9))), ROUTERS)
    assert routing.load.tolist() == [4, 4, 0, 0, 0, 0]


def test_groups_are_squarest_unless_given() -> None:
    assert [most_square_divisor(n) for n in (1, 2, 7, 12, 16, 256)] == [1, 1, 1, 3, 4, 16]
    made = gate("hierarchical", 4, 16, 4)
    assert isinstance(made, Hierarchical)
    assert made.num_groups == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 4}, r"num_groups does not divide the experts \(6 experts, num_groups=4\)"),
        ({"num_groups": 3, "k_groups": 4}, r"k_groups is not in 1 .. 3"),
        ({"num_groups": 3, "k_groups": 3}, r"k is not a multiple of k_groups with at most 2"),
        ({"num_groups": 6, "k_groups": 2}, r"k is not a multiple of k_groups with at most 1"),
    ],
)
def test_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate("hierarchical", 3, 6, 4, **options)
