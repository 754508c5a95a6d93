"""Heads that ranks exchange, on ranks that are threads: whatever the numbers of heads, a query finds its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thread_ranks import run_on_threads
from torch import Tensor

from echelon.parallel.cp.ulysses import shard_heads


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(2, 4, 4), (4, 4, 1), (3, 6, 2), (4, 12, 6)])
def test_each_rank_has_the_keys_of_its_queries(ranks: int, heads: int, kv_heads: int) -> None:
    """A rank gets full sequences; key-value heads that the ranks do not divide come as often as it takes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, size, ranks * 2, 3, generator=generator) for size in (heads, kv_heads, kv_heads))

    def exchanged(axis: Any) -> tuple[Tensor, Tensor, Tensor]:
        own = slice(axis.index * 2, axis.index * 2 + 2)
        return shard_heads(q[:, :, own], k[:, :, own], v[:, :, own], axis)

    for rank, (q_local, k_local, v_local) in enumerate(run_on_threads(ranks, exchanged)):
        each = heads // ranks
        assert torch.equal(q_local, q[:, rank * each : (rank + 1) * each])
        per_key = each // k_local.shape[1]
        owners = [(rank * each + query) * kv_heads // heads for query in range(each)]
        for full, local in ((k, k_local), (v, v_local)):
            assert torch.equal(local.repeat_interleave(per_key, dim=1), full[:, owners])
