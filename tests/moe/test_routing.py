"""The flat lists of assignments: keeping some tokens', and who gets a place."""

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.moe.gates.expert_selection import expert_capacity, positions_in_expert, scatter_dense, stable_top_k
from echelon.moe.routing import count_tokens_per_expert
from tests.moe.reference import accounted, dense, gate, tokens

NAMES = [("mixtral", 2), ("gshard", 2), ("expert-choice", 2), ("switch", 1)]


@pytest.mark.parametrize(("name", "k"), NAMES)
@pytest.mark.parametrize("kept", [[3, 17, 4, 20], [0], list(range(23, -1, -1)), []])
def test_keep_is_the_rows_of_the_tokens(name: str, k: int, kept: list[int]) -> None:
    routing = gate(name, 4, 5, k)(tokens(2, 12, 4, 0))
    mine = routing.select_tokens(torch.tensor(kept, dtype=torch.int64))
    whole = dense(routing, 1)[0]
    assert mine.num_tokens == len(kept)
    assert torch.equal(dense(mine, 1)[0] if kept else torch.zeros(0, 5), whole[kept])
    assert torch.equal(mine.loss, routing.loss)
    assert torch.equal(mine.load, routing.load)
    if routing.choices_per_token:
        assert len(mine.experts) == k * len(kept)
        assert mine.tokens.tolist() == [i for i in range(len(kept)) for _ in range(k)]
    else:
        assert len(mine.experts) == len(routing.experts)
        assert not mine.weights[mine.experts == 5].any()


def test_selecting_tokens_twice() -> None:
    for name, k in NAMES:
        routing = gate(name, 4, 5, k)(tokens(2, 12, 4, 1))
        once = routing.select_tokens(torch.tensor([9, 2, 5, 14])).select_tokens(torch.tensor([3, 1]))
        assert torch.equal(dense(once, 1), dense(routing.select_tokens(torch.tensor([14, 2])), 1))


def test_keep_carries_the_gradient() -> None:
    for name, k in NAMES:
        made, x = gate(name, 4, 5, k), tokens(2, 12, 4, 2)
        chosen = torch.tensor([1, 20, 7])
        pull = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        ours = torch.autograd.grad((dense(made(x).select_tokens(chosen), 1)[0] * pull).sum(), made.weight)[0]
        theirs = torch.autograd.grad((dense(made(x), 1)[0, chosen] * pull).sum(), made.weight)[0]
        assert torch.allclose(ours, theirs, rtol=1e-12)


# --- the best, and places ---------------------------------------------------------------------------------------------


def test_of_equals_the_first_is_the_best() -> None:
    x = torch.tensor([[1.0, 3, 3, 2, 3, 2], [0, 0, 0, 0, 0, 0]])
    assert stable_top_k(x, 4)[1].tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    many = torch.randint(3, (50, 300), generator=torch.Generator().manual_seed(0)).float()
    ours = stable_top_k(many, 250)[1].numpy()
    assert (ours == np.argsort(-many.numpy(), axis=1, kind="stable")[:, :250]).all()


def test_spread_leaves_out_what_was_not_chosen() -> None:
    values = torch.tensor([[5.0, 7.0]], requires_grad=True)
    out = scatter_dense(torch.tensor([[2, 3]]), values, 3)
    assert out.tolist() == [[0, 0, 5]]
    out.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 0]]


def by_hand(row: Tensor) -> list[int]:
    seen: dict[int, int] = {}
    out = []
    for expert in row.tolist():
        out.append(seen.get(expert, 0))
        seen[expert] = out[-1] + 1
    return out


@pytest.mark.parametrize("num", [1, 3, 9])
def test_places_count_those_before(num: int) -> None:
    experts = torch.randint(num + 1, (4, 40), generator=torch.Generator().manual_seed(num))
    assert positions_in_expert(experts, num).tolist() == [by_hand(row) for row in experts]
    counts = [[int((row == expert).sum()) for expert in range(num)] for row in experts]
    assert count_tokens_per_expert(experts, num).tolist() == counts


@pytest.mark.parametrize(
    ("factor", "choices", "num", "expected"),
    [(1.0, 12, 4, 3), (1.25, 12, 4, 4), (1.1, 100, 10, 11), (1.0, 13, 4, 4), (0.01, 12, 4, 1), (1.0, 3, 8, 1)],
)
def test_capacity_is_the_rounded_share(factor: float, choices: int, num: int, expected: int) -> None:
    assert expert_capacity(factor, choices, num) == expected


@pytest.mark.parametrize("seed", range(5))
def test_overflow_is_what_is_above_the_room(seed: int) -> None:
    for name, k, room in (("switch", 1, 4), ("mixtral", 3, 12)):
        made = gate(name, 4, 6, k, seed=seed, capacity_factor=0.8)
        routing = made(tokens(2, 30, 4, seed))
        accounted(routing)
        wanted = made.scores(tokens(2, 30, 4, seed)).topk(k).indices.flatten(1)
        over = sum(max(0, int((wanted == e).sum(1)[g]) - room) for e in range(6) for g in range(2))
        assert int(routing.dropped) == over
