"""The solver against enumeration, and what it makes of a memory cap, a time limit and fixed states."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_enumeration import all_prices, price
from sharding_op_lists import H100S, S0, S1, S2, B, P, R, mlp_problem, transformer_problem

from echelon.parallel.auto_sharding import solve_sharding
from echelon.parallel.auto_sharding.sharding import ShardableOp, Strategy
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem
from echelon.parallel.auto_sharding.solve_sharding import solve

LINK = AxisLink(size=4, bandwidth=1e3, latency=0.01, flops_rate=1e3, memory_bandwidth=1e3)
STATES = (R, B, P, S0, S1)


@st.composite
def problems(draw: st.DrawFn) -> ShardingProblem:
    """Two equal layers of a few random operators between an input and the output."""
    states, numbers = st.sampled_from(STATES), st.integers(0, 40)

    def random_op(name: str, inputs: tuple[int, ...], op: str = "any") -> ShardableOp:
        others = st.builds(Strategy, st.tuples(*[states] * len(inputs)), states, st.sampled_from((0.25, 0.5, 1.0)))
        strategies = [Strategy((R,) * len(inputs), R), *draw(st.lists(others, max_size=3))]
        return ShardableOp(
            name=name,
            op=op,
            inputs=inputs,
            strategies=tuple(draw(st.permutations(strategies))),
            shape=(draw(numbers) * 4 + 4, 4),
            element_bytes=4,
            flops=float(draw(numbers)),
            traffic_bytes=float(draw(numbers)),
            saved_bytes=float(draw(numbers)),
            param=name if op == "param" else "",
        )

    ops = [random_op("x", (), "input"), random_op("w", (), "param")]
    count = draw(st.integers(1, 3))
    for place in range(count):
        reads = draw(st.lists(st.integers(0, 1 + place), min_size=1, max_size=2))
        ops.append(random_op(f"layers.0.{place}", tuple(reads)))
    repeats = {}
    if draw(st.booleans()):
        first, start = 2, len(ops)
        for place in range(count):
            # What reads the input of the first layer reads the result of the first layer in the second.
            moved = {0: start - 1, 1: 1}
            inputs = tuple(moved.get(i, i + count) for i in ops[first + place].inputs)
            ops.append(replace(ops[first + place], name=f"layers.1.{place}", inputs=inputs))
            repeats[start + place] = first + place
    ops.append(replace(random_op("output", (len(ops) - 1,)), op="output"))
    return ShardingProblem(tuple(ops), repeats, microbatches=draw(st.integers(1, 3)))


@settings(deadline=None, max_examples=60)
@given(problems())
def test_optimum_is_that_of_enumeration(problem: ShardingProblem) -> None:
    solution = solve(problem, LINK)
    best = min(seconds for seconds, _ in all_prices(problem, LINK))
    assert solution.optimal
    assert solution.note == ""
    assert solution.cost.total == pytest.approx(best, rel=1e-6)
    seconds, memory = price(problem, solution.strategies, LINK) or (0.0, 0.0)
    assert (solution.cost.total, solution.memory_bytes) == pytest.approx((seconds, memory), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(problems(), st.floats(0.0, 1.2))
def test_optimum_under_a_memory_cap_is_that_of_enumeration(problem: ShardingProblem, place: float) -> None:
    layers = problem.num_layers
    prices = [
        found
        for count in range(layers + 1)
        for found in all_prices(problem, LINK, recomputed=range(0, layers, layers // count) if count else ())
    ]
    least, most = min(memory for _, memory in prices), max(memory for _, memory in prices)
    cap = least + (most - least) * place + 1e-3
    solution = solve(problem, LINK, memory_cap=cap)
    assert solution.memory_bytes <= cap
    best = min(seconds for seconds, memory in prices if memory <= cap)
    assert solution.cost.total == pytest.approx(best, rel=1e-6)
    found = price(problem, solution.strategies, LINK, solution.recomputed_layers)
    assert (solution.cost.total, solution.memory_bytes) == pytest.approx(found, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(problems(), st.data())
def test_fixed_states_are_met_or_refused(problem: ShardingProblem, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(problem.ops) - 1))
    state = data.draw(st.sampled_from([strategy.output for strategy in problem.ops[position].strategies]))
    fixed = {position: state}
    prices = list(all_prices(problem, LINK, fixed=fixed))
    if not prices:
        with pytest.raises(ValueError, match="no legal sharding has all of these states"):
            solve(problem, LINK, fixed=fixed)
        return
    solution = solve(problem, LINK, fixed=fixed)
    assert problem.ops[position].strategies[solution.strategies[position]].output == state
    assert solution.cost.total == pytest.approx(min(seconds for seconds, _ in prices), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(problems())
def test_the_beam_search_is_legal_and_rarely_dearer(problem: ShardingProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve_sharding, "is_installed", lambda: False)
        solution = solve(problem, LINK)
    found = price(problem, solution.strategies, LINK)
    assert found is not None
    assert (solution.cost.total, solution.memory_bytes) == pytest.approx(found, rel=1e-9)
    # So few operators that every open state has a place in the beam.
    assert solution.cost.total == pytest.approx(min(seconds for seconds, _ in all_prices(problem, LINK)), rel=1e-6)
    assert not solution.optimal
    assert "highspy is not installed" in solution.note


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_a_layer_of_150_operators_with_12_strategies_32_times(seed: int) -> None:
    solution = solve(large_problem(seed, layers=32, width=150, count=12), H100S)
    assert solution.optimal
    assert solution.seconds < 10


def large_problem(seed: int, *, layers: int, width: int, count: int) -> ShardingProblem:
    """Equal layers of random operators, each of which reads a few before it."""
    random = Random(seed)
    states = (R, B, P, S0, S1, S2)

    def random_op(name: str, inputs: tuple[int, ...]) -> ShardableOp:
        pairs = {((R,) * len(inputs), R)}
        while len(pairs) < (count if inputs else 4):
            pairs.add((tuple(random.choice(states) for _ in inputs), random.choice(states)))
        strategies = tuple(
            Strategy(states, output, random.choice((0.25, 0.25, 1.0))) for states, output in sorted(pairs)
        )
        return ShardableOp(
            name=name,
            op="any" if inputs else "param",
            inputs=inputs,
            strategies=strategies,
            shape=(1, 4096, random.choice((1024, 4096, 16_384))),
            element_bytes=2,
            flops=random.choice((0.0, 0.0, 1e11)),
            traffic_bytes=1e8,
            saved_bytes=1e7,
            param="" if inputs else name,
        )

    ops = [random_op("x", ())]
    for place in range(width):
        reads = [max(0, 1 + place - random.choice((1, 1, 1, 2, 3, 8))) for _ in range(random.choice((1, 2, 2)))]
        ops.append(random_op(f"layers.0.{place}", tuple(reads) if random.random() < 0.8 else ()))
    for layer, (place, op) in product(range(1, layers), list(enumerate(ops[1:]))):
        moved = tuple(source + layer * width for source in op.inputs)
        ops.append(replace(op, name=f"layers.{layer}.{place}", inputs=moved))
    repeats = {position: 1 + (position - 1) % width for position in range(1 + width, len(ops))}
    last = ShardableOp(
        name="output", op="output", inputs=(len(ops) - 1,), strategies=(Strategy((R,), R),), shape=(1,), element_bytes=2
    )
    return ShardingProblem((*ops, last), repeats, microbatches=8)


def test_the_same_answer_every_time() -> None:
    problem = transformer_problem(
        layers=4, gated=True, tied=True, tokens=True, token_linears=True, residual_slices=True
    )
    first, second = solve(problem, H100S), solve(problem, H100S)
    assert first.strategies == second.strategies
    assert first.cost == second.cost


def test_a_cap_is_met_by_recomputed_layers() -> None:
    problem = transformer_problem(layers=8, gated=True, tied=False)
    free = solve(problem, H100S)
    assert free.recomputed_layers == ()
    found = [solve(problem, H100S, memory_cap=free.memory_bytes * share) for share in (1.0, 0.9, 0.85)]
    assert [len(solution.recomputed_layers) for solution in found] == [0, 5, 6]
    for dearer, cheaper in pairwise(reversed(found)):
        assert dearer.cost.total > cheaper.cost.total
        assert dearer.memory_bytes < cheaper.memory_bytes
        assert dearer.cost.collectives > cheaper.cost.collectives
    assert found[2].optimal


def test_a_cap_that_nothing_fits_is_refused_with_the_least() -> None:
    problem = mlp_problem()
    with pytest.raises(ValueError, match=r"over 4 ranks fits the memory cap of 0.25 GiB.* needs 0\.\d+ GiB") as error:
        solve(problem, H100S, memory_cap=0.25 * 2**30)
    least = float(re.findall(r"needs (\S+) GiB", str(error.value))[0])
    assert solve(problem, H100S, memory_cap=(least + 0.01) * 2**30).memory_bytes <= (least + 0.01) * 2**30


@pytest.mark.parametrize("share", [None, 0.9])
def test_a_time_limit_leaves_a_legal_sharding(share: float | None) -> None:
    problem = transformer_problem(layers=2, gated=False, tied=True, tokens=True, residual_slices=share is None)
    best = solve(problem, H100S)
    cap = share and best.memory_bytes * share
    solution = solve(problem, H100S, memory_cap=cap, time_limit_s=0.0)
    assert not solution.optimal
    assert "ran out of time (0 s); a beam search found this sharding" in solution.note
    found = price(problem, solution.strategies, H100S, solution.recomputed_layers)
    assert (solution.cost.total, solution.memory_bytes) == pytest.approx(found, rel=1e-9)
    assert cap is None or solution.memory_bytes <= cap
    assert solution.cost.total < 1.3 * solve(problem, H100S, memory_cap=cap).cost.total


def test_without_highspy_a_cap_that_is_missed_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_sharding, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"found no sharding within the memory cap of 0.000977 GiB \(highspy is not"):
        solve(mlp_problem(), H100S, memory_cap=2**20)


def test_states_that_contradict_each_other_are_named_alone() -> None:
    problem = mlp_problem()
    number = {op.name: position for position, op in enumerate(problem.ops)}
    # Nothing makes R of B: the gradient of R would be a partial sum.
    fixed = {number["mlp.up"]: B, number["mlp.gelu"]: R, number["mlp.up.weight"]: S0, number["mlp.down.weight"]: S1}
    with pytest.raises(ValueError, match="no legal sharding has all of these states") as error:
        solve(problem, H100S, fixed=fixed)
    assert "(mlp.up=B, mlp.gelu=R)" in str(error.value)


def test_a_state_that_no_strategy_offers_lists_the_legal_ones() -> None:
    problem = mlp_problem()
    with pytest.raises(ValueError, match=r"mlp\.up has no strategy with output S0; legal: B, P, R, S2"):
        solve(problem, H100S, fixed={2: S0})


def test_equal_layers_have_one_state() -> None:
    problem = transformer_problem(layers=2, gated=False, tied=False)
    later, earlier = next((later, earlier) for later, earlier in problem.repeats.items() if problem.ops[later].param)
    with pytest.raises(ValueError, match="equal layers share a sharding"):
        solve(problem, H100S, fixed={earlier: R, later: B})
    solution = solve(problem, H100S, fixed={later: B})
    assert problem.ops[earlier].strategies[solution.strategies[earlier]].output == B
