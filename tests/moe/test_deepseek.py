"""DeepSeek-V2's and V3's gates, token by token."""

import math

import numpy as np
import pytest
import torch

from echelon.moe.gates.deepseek_v2 import DeepSeekV2
from echelon.moe.gates.deepseek_v3 import DeepSeekV3
from tests.moe.reference import Array, Dense, accounted, best, gate, same, softmax, tokens

SHAPES = [(8, 3, 4, 2), (8, 2, 4, 1), (6, 2, 3, 3), (6, 6, 2, 2), (6, 4, 3, 2), (1, 1, 1, 1)]
"""experts, k, groups, groups per token"""


def candidates(scores: Array, num_groups: int, limit: int, highest: int) -> list[int]:
    size = len(scores) // num_groups
    rank = np.array([sum(sorted(scores[d * size : d * size + size])[::-1][:highest]) for d in range(num_groups)])
    return [e for d in best(rank, limit) for e in range(d * size, d * size + size)]


def chosen_among(scores: Array, allowed: list[int], k: int) -> list[int]:
    return sorted(sorted(allowed), key=lambda e: -scores[e])[:k]


def v2(x: Array, w: Array, *, k: int, num_groups: int, limit: int, alphas: tuple[float, float, float]) -> Dense:
    groups, length, _ = x.shape
    num, size = len(w), len(w) // num_groups
    weights, loss = np.zeros((groups, length, num)), np.zeros(groups)
    for g in range(groups):
        f, p, sent = np.zeros(num), np.zeros(num), np.zeros(num_groups)
        for t in range(length):
            s = softmax(w @ x[g, t])
            p += s / length
            chosen = chosen_among(s, candidates(s, num_groups, limit, 1), k)
            weights[g, t, chosen] = s[chosen]
            f[chosen] += num / (k * length)
            for device in {e // size for e in chosen}:
                sent[device] += num_groups / (limit * length)
        for e in range(num):
            loss[g] += alphas[0] * f[e] * p[e]
        for d in range(num_groups):
            mine = slice(d * size, d * size + size)
            loss[g] += alphas[1] * f[mine].mean() * p[mine].sum() + alphas[2] * sent[d] * p[mine].sum()
    return weights, loss


PAPER = (0.003, 0.05, 0.02)
ALONE = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]


@pytest.mark.parametrize(
    ("num", "k", "num_groups", "limit", "alphas"),
    [*((*shape, PAPER) for shape in SHAPES), *((*SHAPES[0], alphas) for alphas in ALONE)],
)
def test_v2_equals_the_paper(num: int, k: int, num_groups: int, limit: int, alphas: tuple[float, float, float]) -> None:
    names = ("balance_experts", "balance_devices", "balance_communication")
    made = gate(
        "deepseek-v2",
        3,
        num,
        k,
        seed=num,
        num_groups=num_groups,
        group_limit=limit,
        **dict(zip(names, alphas, strict=True)),
    )
    routing = same(made, tokens(2, 7, 3, k), lambda *a: v2(*a, k=k, num_groups=num_groups, limit=limit, alphas=alphas))
    accounted(routing)
    devices = routing.experts.view(-1, k) // (num // num_groups)
    assert max(len(set(row)) for row in devices.tolist()) <= limit


def v3(x: Array, w: Array, *, k: int, num_groups: int, limit: int, bias: Array, alpha: float) -> Dense:
    groups, length, _ = x.shape
    num = len(w)
    weights, loss = np.zeros((groups, length, num)), np.zeros(groups)
    for g in range(groups):
        f, p = np.zeros(num), np.zeros(num)
        for t in range(length):
            s = np.array([1 / (1 + math.exp(-v)) for v in w @ x[g, t]])
            allowed = candidates(s + bias, num_groups, limit, max(1, k // limit))
            chosen = chosen_among(s + bias, allowed, k)
            weights[g, t, chosen] = s[chosen] / sum(s[chosen])
            f[best(s, k)] += num / (k * length)
            p += s / sum(s) / length
        loss[g] = alpha * sum(f * p)
    return weights, loss


@pytest.mark.parametrize(("num", "k", "num_groups", "limit"), SHAPES)
def test_v3_equals_the_paper(num: int, k: int, num_groups: int, limit: int) -> None:
    made = gate("deepseek-v3", 3, num, k, seed=num, num_groups=num_groups, group_limit=limit, balance=0.5)
    assert isinstance(made, DeepSeekV3)
    bias = np.random.default_rng(num).normal(size=num) * 0.3
    made.bias.copy_(torch.from_numpy(bias))
    routing = same(
        made,
        tokens(2, 7, 3, k),
        lambda *a: v3(*a, k=k, num_groups=num_groups, limit=limit, bias=bias, alpha=0.5),
    )
    accounted(routing)
    assert torch.allclose(routing.weights.view(-1, k).sum(1), torch.ones(14, dtype=torch.float64))


def test_a_negative_bias_opens_no_closed_group() -> None:
    """Zeros in place of minus infinity would be larger than what is left inside the chosen groups."""
    made = gate("deepseek-v3", 3, 8, 2, num_groups=4, group_limit=1)
    assert isinstance(made, DeepSeekV3)
    made.bias.fill_(-5)
    groups = made(tokens(2, 20, 3, 0)).experts.view(-1, 2) // 2
    assert bool((groups[:, 0] == groups[:, 1]).all())


def test_the_papers_numbers_are_the_defaults() -> None:
    two, three = DeepSeekV2(4, 160, 6), DeepSeekV3(4, 256, 8)
    assert (two.num_groups, two.group_limit) == (8, 3)
    assert (two.balance_experts, two.balance_devices, two.balance_communication) == (0.003, 0.05, 0.02)
    assert (three.num_groups, three.group_limit, three.balance, three.speed) == (8, 4, 0.0001, 0.001)


def test_options_change_the_weights_alone() -> None:
    x = tokens(2, 7, 3, 0)
    plain, changed = (gate("deepseek-v2", 3, 8, 3, **o) for o in ({}, {"normalise": True, "scale": 16.0}))
    a, b = plain(x), changed(x)
    assert torch.equal(a.experts, b.experts)
    assert torch.equal(a.loss, b.loss)
    assert torch.allclose(b.weights.view(-1, 3), 16 * a.weights.view(-1, 3) / a.weights.view(-1, 3).sum(1, True))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 3}, r"num_groups does not divide the experts \(8 experts, num_groups=3\)"),
        ({"num_groups": 2}, r"group_limit is not in 1 .. 2"),
        ({"num_groups": 8, "group_limit": 1}, r"1 groups of 1 experts have less than k \(k=2"),
    ],
)
def test_refuses(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate(name, 4, 8, 2, **options)
