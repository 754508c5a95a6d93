"""Rounds: every row once, and never more at a time than there is room for."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.ep.chunked_dispatch import DispatchChunks, max_received_tokens, num_chunks


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    parts, etp, local = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, 40), min_size=parts * local, max_size=parts * local)
    table = torch.tensor([draw(rows) for _ in range(parts * etp)])
    return table, etp, draw(st.integers(1, 60))


@settings(deadline=None, max_examples=60)
@given(tables())
def test_chunks_take_every_token_once_and_stay_below_the_limit(case: tuple[Tensor, int, int]) -> None:
    table, etp, limit = case
    ranks = len(table)
    rounds = num_chunks(table, etp, limit)
    for rank in range(ranks):
        axis = MeshAxis("ep*etp", range(ranks), rank, None, frozenset())
        parts = list(DispatchChunks(axis, table, etp, rounds).chunks(torch.device("cpu")))
        taken = torch.cat([part.index for part in parts])
        assert sorted(taken.tolist()) == list(range(int(table[rank].sum())))
        mine = table.view(ranks, ranks // etp, -1)[:, rank // etp]
        assert sum(int(part.all_to_all.expert_ends[-1]) for part in parts) == int(mine.sum())
        assert all(int(part.all_to_all.expert_ends[-1]) <= max(limit, ranks) for part in parts)


def test_one_chunk_below_the_limit() -> None:
    table = torch.tensor([[3, 1], [2, 4]])
    assert max_received_tokens(table, 1) == 5
    assert num_chunks(table, 1, 5) == 1
    assert num_chunks(table, 1, 4) == 2
    assert max_received_tokens(table, 2) == 10
    assert num_chunks(torch.zeros(2, 2, dtype=torch.int64), 1, 1) == 1
