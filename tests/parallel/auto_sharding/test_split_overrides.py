"""Overrides as text: what they fix, and every fault at once."""

from __future__ import annotations

import pytest
from sharding_op_lists import H100S, R, transformer_problem

from echelon.layout.validation_error import ValidationError
from echelon.parallel.auto_sharding.solve_sharding import solve
from echelon.parallel.auto_sharding.split_overrides import fixed_states, parse_overrides

PROBLEM = transformer_problem(layers=2, gated=True, tied=False)


def test_lines_fix_parameters_and_operators_of_all_layers() -> None:
    overrides = parse_overrides(
        """
        # the scores stay whole
        blocks.*.attn.scores = R     # in every layer
        blocks.*.mlp.up.weight=S0
        """
    )
    assert overrides == {"blocks.*.attn.scores": "R", "blocks.*.mlp.up.weight": "S0"}
    fixed = fixed_states(PROBLEM, overrides)
    assert {PROBLEM.ops[position].name: str(state) for position, state in fixed.items()} == {
        "blocks.0.attn.scores": "R",
        "blocks.1.attn.scores": "R",
        "blocks.0.mlp.up.weight": "S0",
        "blocks.1.mlp.up.weight": "S0",
    }
    free, solution = solve(PROBLEM, H100S), solve(PROBLEM, H100S, fixed=fixed)
    assert solution.cost.total > free.cost.total
    for op, number in zip(PROBLEM.ops, solution.strategies, strict=True):
        if op.op == "attention":
            assert op.strategies[number].output == R


def test_a_part_of_the_layers_fixes_all() -> None:
    fixed = fixed_states(PROBLEM, {"blocks.0.attn.scores": "R"})
    solution = solve(PROBLEM, H100S, fixed=fixed)
    outputs = [
        op.strategies[number].output
        for op, number in zip(PROBLEM.ops, solution.strategies, strict=True)
        if op.op == "attention"
    ]
    assert outputs == [R, R]


def test_lines_that_are_no_override_are_refused_together() -> None:
    with pytest.raises(ValidationError) as error:
        parse_overrides("blocks.*.up S0\na = R\na = S0\n= R")
    assert str(error.value).splitlines() == [
        "line 1=blocks.*.up S0 is no override; legal: pattern = state",
        "a=S0 is R in an earlier line; give one",
        "line 4== R is no override; legal: pattern = state",
    ]


def test_every_fault_of_overrides_at_once() -> None:
    overrides = {
        "blocks.*.mlp.upp.weight": "S0",
        "blocks.*.attn.scores": "S3",
        "blocks.*.mlp.*.weight": "Q",
        "blocks.*.attn.q.weight": "S0",
        "blocks.1.attn.q.*": "S1",
    }
    with pytest.raises(ValidationError) as error:
        fixed_states(PROBLEM, overrides)
    assert str(error.value).splitlines() == [
        'blocks.*.mlp.upp.weight=S0 matches no operator and no parameter; did you mean "blocks.*.mlp.up.weight"?',
        "blocks.*.attn.scores=S3 is a state that no strategy offers; legal: B, R, S1",
        "blocks.*.mlp.*.weight=Q is no state; legal: B, R, S0, S1",
        "blocks.1.attn.q.*=S1 contradicts blocks.*.attn.q.weight=S0 for blocks.1.attn.q.weight; give one state",
    ]
