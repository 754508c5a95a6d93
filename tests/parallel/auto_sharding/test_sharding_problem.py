"""What a sharding problem refuses, and how it numbers equal layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharding_op_lists import mlp_problem, transformer_problem

from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem


def test_layers_are_numbered_by_their_copies() -> None:
    problem = transformer_problem(layers=3, gated=False, tied=False)
    numbers = {op.name: number for op, number in zip(problem.ops, problem.layer_numbers, strict=True)}
    assert [numbers[f"blocks.{layer}.mlp.up"] for layer in range(3)] == [0, 1, 2]
    assert numbers["embed"] is None
    assert problem.num_layers == 3
    assert mlp_problem().num_layers == 0


def test_an_operator_may_repeat_a_repeated_one() -> None:
    problem = transformer_problem(layers=3, gated=False, tied=False)
    length = len(problem.repeats) // 2
    first = min(problem.repeats.values())
    chained = {later: later - length for later in problem.repeats}
    assert ShardingProblem(problem.ops, chained).first_copies == problem.first_copies
    assert problem.first_copies[first + 2 * length] == first


def test_faults_name_the_operator() -> None:
    ops = mlp_problem().ops
    with pytest.raises(ValueError, match=r"operator mlp\.up \(position 2\) has no strategy"):
        ShardingProblem((*ops[:2], replace(ops[2], strategies=()), *ops[3:]))
    with pytest.raises(ValueError, match=r"operator mlp\.up .* reads \(2, 1\), expected positions before it"):
        ShardingProblem((*ops[:2], replace(ops[2], inputs=(2, 1)), *ops[3:]))
    with pytest.raises(ValueError, match=r"operator mlp\.up .* reads 1 tensors, its strategies another number"):
        ShardingProblem((*ops[:2], replace(ops[2], inputs=(1,)), *ops[3:]))
    with pytest.raises(ValueError, match="operator 1 repeats 4, expected an earlier position"):
        ShardingProblem(ops, {1: 4})
    with pytest.raises(ValueError, match=r"operator mlp\.gelu repeats mlp\.up, which has another operation"):
        ShardingProblem(ops, {3: 2})


def test_an_axis_has_rates() -> None:
    with pytest.raises(ValueError, match="rates above zero"):
        AxisLink(size=2, bandwidth=0.0, latency=0.0, flops_rate=1.0, memory_bandwidth=1.0)
