"""Ranks that would find different answers take the first rank's; different values are found out on all of them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from thread_ranks import ThreadRank, run_on_threads

from echelon.parallel.auto_sharding.sharding_problem import ShardingCost, ShardingSolution
from echelon.parallel.comm.first_rank import call_on_first_rank, first_different_rank

CPU = torch.device("cpu")


def found_by(rank: int) -> ShardingSolution:
    """What a rank finds whose search ended at another point than the others'."""
    return ShardingSolution(
        strategies=(rank, 0, 1),
        cost=ShardingCost(compute=1e-3, traffic=rank / 3, collectives=2e-5),
        memory_bytes=1e9 / 3,
        recomputed_layers=(1,),
        optimal=rank > 0,
        seconds=60.0,
        note=f"not proven optimal: rank {rank} ran out of time – ä",
    )


def test_all_ranks_get_the_first_ranks_answer() -> None:
    def agree(axis: ThreadRank) -> ShardingSolution:
        answer = call_on_first_rank(lambda: asdict(found_by(axis.index)), axis, CPU)  # type: ignore[arg-type]
        return ShardingSolution.from_dict(answer)

    assert run_on_threads(3, agree) == [found_by(0)] * 3


def test_an_error_of_the_first_rank_is_raised_on_all() -> None:
    def refuse() -> dict[str, object]:
        raise ValueError("no legal sharding has all of these states (up=B); leave one of them to the solver")

    def agree(axis: ThreadRank) -> str:
        with pytest.raises(ValueError, match="no legal sharding") as caught:
            call_on_first_rank(refuse if axis.index == 0 else dict, axis, CPU)  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(run_on_threads(2, agree))) == 1


def test_different_values_are_found_on_all_ranks() -> None:
    values = [("a", 1), ("a", 1), ("a", 2), ("b", 1)]
    for size, expected in ((4, 2), (2, None)):
        assert (
            run_on_threads(size, lambda axis: first_different_rank(values[axis.index], axis, CPU)) == [expected] * size
        )
