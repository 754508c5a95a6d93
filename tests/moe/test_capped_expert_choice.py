"""The capped expert choice: its assignment against Dykstra's own method and against every assignment there is."""

from itertools import combinations, product

import numpy as np
import pytest
import torch

from echelon.moe.gates.balanced_assignment import dual_prices, solve_shift
from echelon.moe.gates.expert_choice import CappedExpertChoice
from tests.moe.reference import Array, Dense, accounted, best, dense, gate, same, softmax, tokens


def dykstra(s: Array, k: int, cap: float, entropy: float, rounds: int) -> Array:
    """Dykstra's alternating projections in the Kullback-Leibler distance, with a memory for each inequality."""
    a = np.exp(s / entropy)
    capped, bounded = np.ones_like(a), np.ones_like(a)
    for _ in range(rounds):
        a = a * k / a.sum(1, keepdims=True)
        before = a * capped
        a = before * np.minimum(1, cap / before.sum(0, keepdims=True))
        capped = before / a
        before = a * bounded
        a = np.minimum(before, 1)
        bounded = before / a
    return a


def value(s: Array, a: Array, entropy: float) -> float:
    return float((s * a).sum() - entropy * (a * np.log(np.maximum(a, 1e-300))).sum())


def scores(groups: int, num: int, length: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(groups, length, num, dtype=torch.float64, generator=generator)
    return (scale * logits).softmax(-1).transpose(1, 2)


def solved(s: torch.Tensor, k: int, cap: float, entropy: float, rounds: int = 100) -> Array:
    """A, of the prices."""
    u, v = dual_prices(s, k, cap, entropy, rounds)
    a: Array = ((s - u.unsqueeze(-1) - v.unsqueeze(-2)) / entropy).clamp(max=0).exp().numpy()
    return a


@pytest.mark.parametrize("total", [1, 3, 2.5, 7])
def test_a_shift_gives_the_sum(total: float) -> None:
    x = 5 * torch.randn(20, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = solve_shift(x, total)
    found = (x - t.unsqueeze(-1)).clamp(max=0).exp().sum(-1)
    assert torch.allclose(found, torch.full_like(found, total), rtol=1e-12)


@pytest.mark.parametrize(("k", "cap"), [(4, 2), (4, 3), (6, 3), (2, 1), (8, 4)])
def test_the_assignment_is_dykstras(k: int, cap: int) -> None:
    """With an entropy large enough for his method to arrive."""
    s = scores(3, 4, 8, seed=k)
    ours = solved(s, k, cap, 0.05, rounds=400)
    for g in range(3):
        theirs = dykstra(s[g].numpy(), k, cap, 0.05, 8_000)
        np.testing.assert_allclose(ours[g], theirs, atol=1e-6)


@pytest.mark.parametrize(("cap", "tolerance"), [(2, 0.02), (3, 1e-3)])
def test_at_the_papers_entropy_the_constraints_hold(cap: int, tolerance: float) -> None:
    """100 rounds at 0.001. A cap equal to the mean leaves no slack anywhere, which is slowest."""
    s = scores(4, 8, 64, seed=cap)
    a = solved(s, 16, cap, 0.001)
    np.testing.assert_allclose(a.sum(2), 16, rtol=1e-10)
    assert a.min() >= 0
    assert a.max() <= 1
    assert a.sum(1).max() <= cap + tolerance


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_assignments(seed: int) -> None:
    """Without entropy the best A is a set of whole tokens, here found by trying them all."""
    s = scores(1, 3, 5, seed, scale=2.0)
    tried = []
    for sets in product(combinations(range(5), 2), repeat=3):
        a = np.zeros((3, 5))
        for e, taken in enumerate(sets):
            a[e, list(taken)] = 1
        if a.sum(0).max() <= 2:
            tried.append((float((s[0].numpy() * a).sum()), a))
    reached, whole = max(tried, key=lambda found: found[0])
    a = solved(s, 2, 2, 0.001, rounds=300)[0]
    assert abs(float((s[0].numpy() * a).sum()) - reached) < 0.001 * 15
    assert value(s[0].numpy(), a, 0.001) >= value(s[0].numpy(), whole, 0.001) - 1e-6
    second = sorted(found[0] for found in tried)[-2]
    if reached - second > 0.02:
        np.testing.assert_allclose(a, whole, atol=0.01)


def test_a_cap_that_never_binds_changes_nothing() -> None:
    x = tokens(2, 12, 3, 0)
    free, capped = gate("expert-choice", 3, 4, 2), gate("expert-choice-capped", 3, 4, 2, cap=4)
    assert torch.equal(free(x).tokens, capped(x).tokens)
    assert torch.equal(free(x).weights, capped(x).weights)


def reference(x: Array, w: Array, *, taken: int, cap: int, entropy: float) -> Dense:
    groups, length, _ = x.shape
    weights = np.zeros((groups, length, len(w)))
    for g in range(groups):
        s = np.array([softmax(w @ x[g, t]) for t in range(length)])
        a = dykstra(s.T, taken, cap, entropy, 60)
        for e in range(len(w)):
            for t in best(a[e], taken):
                weights[g, t, e] = s[t, e]
    return weights, np.zeros(groups)


@pytest.mark.parametrize(("num", "c", "cap"), [(4, 2, 2), (4, 2, 3), (4, 1, 1), (1, 1, 1)])
def test_equals_the_paper(num: int, c: float, cap: int) -> None:
    """At a high entropy, where 60 of Dykstra's rounds are enough to see who is largest."""
    made = gate("expert-choice-capped", 3, num, c, seed=num, cap=cap, entropy=0.2)
    taken = int(12 * c / num)
    routing = same(made, tokens(2, 12, 3, num), lambda *a: reference(*a, taken=taken, cap=cap, entropy=0.2))
    accounted(routing)
    assert routing.load.tolist() == [2 * taken] * num


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cap", [2, 3])
def test_few_experts_see_a_token(dtype: torch.dtype, cap: int) -> None:
    x = tokens(4, 64, 3, 5).to(dtype)
    free = gate("expert-choice", 3, 8, 2, groups=4).to(dtype)
    capped = gate("expert-choice-capped", 3, 8, 2, groups=4, cap=cap).to(dtype)
    before, after = ((dense(made(x), 4) > 0).sum(-1) for made in (free, capped))
    assert int((before > cap).sum()) > 1
    # Rounding may give a token one more where the assignment is fractional.
    assert int(after.max()) <= cap + 1
    assert float((after > cap).double().mean()) < 0.01


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"above the cap \(k=3, cap=2\)"):
        CappedExpertChoice(4, 8, 3, cap=2)
    with pytest.raises(ValueError, match=r"entropy must be above 0 and rounds 1 or more \(entropy=0, rounds=100\)"):
        CappedExpertChoice(4, 8, entropy=0)


def test_a_short_text_has_more_experts_than_the_cap() -> None:
    """It was refused: the text that a training writes at its end starts with a few tokens."""
    routing = CappedExpertChoice(4, 8, 2)(torch.randn(1, 2, 4))
    assert routing.load.tolist() == [1] * 8
