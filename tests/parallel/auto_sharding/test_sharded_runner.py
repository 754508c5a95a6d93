"""Any legal strategies of a module's operators, on ranks that are threads, compute what the module does."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from random_shardings import Coverage, TracedCase
from torch.nn import functional as F
from traced_modules import MODULES, build
from traced_operators import OPERATORS, ROWS, TIME, WIDTH, Operators, families, inputs

from echelon.parallel.auto_sharding.op_rules import RULES
from echelon.parallel.auto_sharding.shard_graph import split_module
from echelon.parallel.auto_sharding.sharding import KINDS, PARTIAL, REPLICATE, Sharding, conversion, shard

TOLERANCE = 1e-10


@cache
def case(name: str) -> TracedCase:
    model, batch = build(name)
    return TracedCase(model, batch(4, 0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODULES)
def test_any_legal_sharding_equals_the_module(name: str, size: int) -> None:
    for seed in range(3 if size == 2 else 1):
        strategies = case(name).draw(size, seed)
        ranks = case(name).run(strategies, size)
        assert case(name).error(strategies, ranks) < TOLERANCE, seed
        assert {rank.issued for rank in ranks} == {ranks[0].issued}


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", [*MODULES, *OPERATORS])
def test_many_legal_shardings_equal_the_module(name: str, size: int) -> None:
    one = case(name) if name in MODULES else TracedCase(OPERATORS[name], inputs())
    for seed in range(100, 120):
        strategies = one.draw(size, seed)
        assert one.error(strategies, one.run(strategies, size)) < TOLERANCE, seed


def test_every_rule_and_every_conversion_is_executed() -> None:
    """Of families of operators, a few draws over two ranks, and one over four."""
    coverage = Coverage()
    for family in families():
        one = TracedCase(family, inputs(), coverage)
        for size, seed in ((2, 0), (2, 1), (2, 2), (4, 3)):
            strategies = one.draw(size, seed)
            errors = one.errors(strategies, one.run(strategies, size))
            assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}, (size, seed)
    used = {RULES[op] for op in coverage.operators if op in RULES}
    assert {op for op, rule in RULES.items() if rule not in used} == set()
    assert coverage.conversions == all_conversions()


def all_conversions() -> set[tuple[str, str]]:
    """The kinds of states between which sharding.py has a conversion; (S, =S) has other blocks of one dimension."""
    found = set()
    for source, target in product(KINDS, KINDS):
        first = Sharding(source) if source != "S" else shard(0)
        second = Sharding(target) if target != "S" else shard(1)
        if first != second and conversion(first, second) is not None:
            found.add((source, target))
    return found | {("S", "=S")}


# -- planted errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_a_derived_plan_without_a_collective_is_wrong(name: str) -> None:
    one = case(name)
    strategies = split_module(one.traced, 2).strategies
    ranks = one.run(strategies, 2)
    assert one.error(strategies, ranks) < TOLERANCE
    issued = set(ranks[0].issued)
    assert issued
    for op in issued:
        assert not one.error(strategies, one.run(strategies, 2, dropped=op)) < 1e-6, op


def test_a_sharding_of_all_collectives_needs_each_of_them() -> None:
    one, seed = case("llama"), 0
    strategies = one.draw(2, seed)
    issued = set(one.run(strategies, 2)[0].issued)
    assert issued == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for op in issued:
        assert not one.error(strategies, one.run(strategies, 2, dropped=op)) < 1e-6, op


# -- what one rank runs ------------------------------------------------------------------------------------------------


def test_a_bias_behind_a_contracted_dimension_is_added_once() -> None:
    """A row-parallel linear: every rank has the whole bias and its whole gradient."""
    one = case("gpt")
    row = [
        (number, index)
        for number, op in enumerate(one.ops(2))
        for index, strategy in enumerate(op.strategies)
        if op.name == "blocks.0.out" and strategy.output == PARTIAL and strategy.inputs[0] == shard(2)
    ]
    number, index = row[0]
    assert one.ops(2)[number].strategies[index].inputs == (shard(2), shard(1), REPLICATE)


def test_a_dropout_behind_blocks_draws_its_part_of_the_mask() -> None:
    """A fused linear leaves q, k and v of each rank apart: so does the mask."""
    one = TracedCase(OPERATORS["dropped"], inputs())
    ops = one.ops(2)
    dropout = next(number for number, op in enumerate(ops) if op.op == "module")
    blocks = next(strategy for strategy in ops[dropout].strategies if strategy.output == shard(2, 2))
    for seed in range(60):
        strategies = one.draw(2, seed)
        if strategies[dropout] == blocks:
            assert one.error(strategies, one.run(strategies, 2)) < TOLERANCE
            return
    raise AssertionError("no draw has a dropout of blocks")


@pytest.mark.parametrize("padding", [0, 3, WIDTH - 1])
def test_the_padding_row_of_a_divided_table_has_no_gradient(padding: int) -> None:
    """Whichever rank holds it, and also where its id is 0."""
    ids = torch.arange(ROWS * TIME).view(ROWS, TIME) % WIDTH
    lookup = Operators(lambda m, x, ids: F.embedding(ids, m.w, padding_idx=padding), w=(WIDTH, WIDTH))
    one = TracedCase(lookup, {**inputs(), "ids": ids})
    assert one.truth.gradients["w"][padding].count_nonzero() == 0
    number = next(number for number, op in enumerate(one.ops(2)) if op.op == "embedding")
    for seed in range(60):
        strategies = one.draw(2, seed)
        if strategies[number].inputs[0] == shard(0):
            assert one.error(strategies, one.run(strategies, 2)) < TOLERANCE
            return
    raise AssertionError("no draw divides the rows of the table")
