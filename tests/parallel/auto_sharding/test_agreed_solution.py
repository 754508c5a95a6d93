"""Ranks that would solve differently run the first rank's solution; those with different graphs are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sharding_op_lists import mlp_problem
from thread_ranks import ThreadRank, run_on_threads

from echelon.parallel.auto_sharding.agreed_solution import agree_on_solution, check_equal_problems
from echelon.parallel.auto_sharding.sharding_problem import ShardingCost, ShardingProblem, ShardingSolution

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


def test_all_ranks_run_the_first_ranks_solution() -> None:
    def agree(axis: ThreadRank) -> ShardingSolution:
        return agree_on_solution(lambda: found_by(axis.index), axis, CPU)  # type: ignore[arg-type]

    assert run_on_threads(3, agree) == [found_by(0)] * 3


def test_an_error_of_the_first_rank_is_raised_on_all() -> None:
    def refuse() -> ShardingSolution:
        raise ValueError("no legal sharding has all of these states (up=B); leave one of them to the solver")

    def agree(axis: ThreadRank) -> str:
        with pytest.raises(ValueError, match="no legal sharding") as caught:
            agree_on_solution(refuse if axis.index == 0 else lambda: found_by(1), axis, CPU)  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(run_on_threads(2, agree))) == 1


def test_different_graphs_are_refused_on_all_ranks() -> None:
    def check(axis: ThreadRank, other: ShardingProblem) -> str:
        with pytest.raises(ValueError, match="ranks traced different graphs") as caught:
            check_equal_problems(other if axis.index == 2 else problem, axis, CPU)  # type: ignore[arg-type]
        return str(caught.value)

    problem = mlp_problem()
    longer = replace(problem, ops=(*problem.ops, replace(problem.ops[-1], name="again")))
    expected = f"rank 0: {len(problem.ops)} operators, rank 2: {len(problem.ops) + 1}"
    assert all(expected in text for text in run_on_threads(4, lambda axis: check(axis, longer)))
    renamed = replace(problem, ops=(*problem.ops[:-1], replace(problem.ops[-1], shape=(7, 7))))
    run_on_threads(4, lambda axis: check(axis, renamed))
    run_on_threads(2, lambda axis: check_equal_problems(problem, axis, CPU))
