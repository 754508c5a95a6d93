"""The solver finds Megatron-LM's sharding where there is nothing else, and a cheaper one where there is."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from sharding_op_lists import H100S, S0, S1, S2, B, P, R, attention_problem, mlp_problem, transformer_problem

from echelon.parallel.auto_sharding.sharding import Sharding, Strategy
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem, ShardingSolution
from echelon.parallel.auto_sharding.solve_sharding import solve
from echelon.parallel.auto_sharding.split_table import split_table

COLUMN, ROW = ((B, S0), S2), ((S2, S1), P)
ROW_PARALLEL = ("attn.o", "mlp.down")


def chosen(problem: ShardingProblem, solution: ShardingSolution) -> dict[str, Strategy]:
    return {op.name: op.strategies[number] for op, number in zip(problem.ops, solution.strategies, strict=True)}


def linears(problem: ShardingProblem, solution: ShardingSolution) -> dict[str, tuple[tuple[Sharding, ...], Sharding]]:
    found = chosen(problem, solution)
    return {op.name: (found[op.name].inputs, found[op.name].output) for op in problem.ops if op.op == "linear"}


def megatron_states(problem: ShardingProblem, residual: Sharding) -> dict[int, Sharding]:
    """The sharding that Megatron-LM's layers have, written by hand; the residual stream lies in `residual`."""
    states: dict[int, Sharding] = {}
    for position, op in enumerate(problem.ops):
        is_row = op.name.removesuffix(".weight").endswith(ROW_PARALLEL)
        if op.param:
            whole = R if residual == R else B
            states[position] = whole if len(op.shape) == 1 else S1 if is_row else S0
        elif op.op in ("add", "rms_norm"):
            states[position] = residual
        elif op.op in ("embedding", "linear"):
            states[position] = P if is_row or op.op == "embedding" else S2
    return states


def microbatch_collectives(
    problem: ShardingProblem, solution: ShardingSolution, link: AxisLink = H100S
) -> Counter[str]:
    """Count the collectives of activations in a microbatch."""
    counts: Counter[str] = Counter()
    for row in split_table(problem, solution, link).rows:
        for item in row.collectives:
            if item.purpose == "activations":
                counts[item.op] += item.count // problem.microbatches
    return counts


def test_mlp_is_column_then_row_parallel() -> None:
    problem = mlp_problem()
    solution = solve(problem, H100S)
    assert linears(problem, solution) == {"mlp.up": COLUMN, "mlp.down": ROW}
    assert chosen(problem, solution)["mlp.gelu"] == Strategy((S2,), S2, 1 / 4)
    # R to B at the entry, whose backward reduces, and P to R at the exit.
    assert microbatch_collectives(problem, solution) == {"all_reduce": 2}


def test_attention_shares_one_entry_among_q_k_and_v() -> None:
    problem = attention_problem()
    solution = solve(problem, H100S)
    assert linears(problem, solution) == {"attn.q": COLUMN, "attn.k": COLUMN, "attn.v": COLUMN, "attn.o": ROW}
    assert chosen(problem, solution)["attn.scores"] == Strategy((S1, S1, S1), S1, 1 / 4)
    assert microbatch_collectives(problem, solution) == {"all_reduce": 2}


@pytest.mark.parametrize(("gated", "tied"), [(True, False), (False, True)], ids=["llama", "gpt"])
def test_a_transformer_is_megatrons(gated: bool, tied: bool) -> None:
    problem = transformer_problem(layers=4, gated=gated, tied=tied)
    solution = solve(problem, H100S)
    found = chosen(problem, solution)
    for name, states in linears(problem, solution).items():
        assert states == (ROW if name.endswith(ROW_PARALLEL) else COLUMN), name
    # The vocabulary is sharded in the embedding, the head and the loss.
    assert found["embed.weight"].output == S0
    assert found["embed"].output == P
    assert found["loss"].inputs == (S2, R)
    # Four all-reduces a layer, that of the embedding, and that of the head's input.
    assert microbatch_collectives(problem, solution) == {"all_reduce": 4 * 4 + 2}
    by_hand = solve(problem, H100S, fixed=megatron_states(problem, R))
    assert by_hand.cost.total == pytest.approx(solution.cost.total, rel=1e-9)


def test_sequence_parallel_where_norms_may_take_slices() -> None:
    problem = transformer_problem(layers=4, gated=True, tied=True, tokens=True)
    solution = solve(problem, H100S)
    found = chosen(problem, solution)
    for name, states in linears(problem, solution).items():
        assert states == (ROW if name.endswith(ROW_PARALLEL) else COLUMN), name
    for op in problem.ops:
        if op.op in ("add", "rms_norm"):
            assert found[op.name].output == S1, op.name
    counts = microbatch_collectives(problem, solution)
    assert counts["all_reduce"] == 0
    assert counts["all_gather"] >= 4 * 4
    assert counts["all_gather"] == counts["reduce_scatter"]
    # An all-reduce sends as many bytes as the pair: norms and additions on slices are what is won.
    without = solve(transformer_problem(layers=4, gated=True, tied=True), H100S)
    assert solution.cost.traffic < without.cost.traffic
    assert solution.cost.total < without.cost.total
    assert solution.memory_bytes < without.memory_bytes


def test_all_reduces_where_latency_rules() -> None:
    slow = AxisLink(size=4, bandwidth=3e11, latency=1e-2, flops_rate=5e14, memory_bandwidth=2.5e12)
    sizes = {"seq_len": 64, "width": 16_384}
    problem = transformer_problem(layers=2, gated=True, tied=True, tokens=True, microbatches=1, **sizes)
    counts = microbatch_collectives(problem, solve(problem, slow), slow)
    # The fewest collectives: nothing that is gathered and scattered in turn.
    assert counts["reduce_scatter"] == 0


@pytest.mark.parametrize("residual", [R, S1])
@pytest.mark.parametrize("token_linears", [False, True])
def test_never_dearer_than_the_sharding_by_hand(residual: Sharding, token_linears: bool) -> None:
    problem = transformer_problem(
        layers=4, gated=False, tied=True, tokens=True, token_linears=token_linears, residual_slices=True
    )
    by_hand = solve(problem, H100S, fixed=megatron_states(problem, residual))
    found = solve(problem, H100S)
    assert found.cost.total <= by_hand.cost.total * (1 + 1e-9)
    # Where linears take no slices of the sequence, Megatron-LM's sequence parallelism is the optimum.
    is_optimum = residual == S1 and not token_linears
    assert (found.cost.total == pytest.approx(by_hand.cost.total, rel=1e-9)) == is_optimum


def test_one_rank_communicates_nothing() -> None:
    link = AxisLink(size=1, bandwidth=3e11, latency=1e-5, flops_rate=5e14, memory_bandwidth=2.5e12)
    problem = transformer_problem(layers=2, gated=True, tied=True, ranks=1)
    assert solve(problem, link).cost.collectives == 0


def test_equal_layers_are_solved_once() -> None:
    few, many = (transformer_problem(layers=layers, gated=True, tied=False) for layers in (2, 32))
    start = time.monotonic()
    solution = solve(many, H100S)
    assert time.monotonic() - start < 10
    found, expected = chosen(many, solution), chosen(few, solve(few, H100S))
    assert {name: found[name] for name in expected} == expected
    for later, earlier in many.repeats.items():
        assert solution.strategies[later] == solution.strategies[earlier]
