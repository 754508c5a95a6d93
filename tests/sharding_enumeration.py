"""Every assignment of a small sharding problem, priced by the rules alone: no merging, no pruning, no program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import prod

from echelon.parallel.auto_sharding.sharding import Sharding, conversion
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem

RING = {"": 0, "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""passes of the full tensor around the ring"""


def collective_seconds(kind: str, size: float, link: AxisLink) -> float:
    if not kind:
        return 0.0
    if kind == "all_to_all":
        return link.latency + size / link.size * (link.size - 1) / link.size / link.bandwidth
    return link.latency + RING[kind] * size * (link.size - 1) / link.size / link.bandwidth


def price(
    problem: ShardingProblem, strategies: tuple[int, ...], link: AxisLink, recomputed: Collection[int] = ()
) -> tuple[float, float] | None:
    """Return the seconds of a step and the bytes on a rank; None where an input cannot be converted."""
    ops = problem.ops
    chosen = [op.strategies[number] for op, number in zip(ops, strategies, strict=True)]
    layers = [number if number in recomputed else None for number in problem.layer_numbers]
    share = [1 / link.size if strategy.output.kind == "S" else 1.0 for strategy in chosen]
    seconds = memory = 0.0
    conversions: set[tuple[int, Sharding, int | None]] = set()
    entered: set[tuple[int, int]] = set()
    for reader, (op, strategy, layer) in enumerate(zip(ops, chosen, layers, strict=True)):
        if op.op == "output" and str(strategy.output) != "R":
            return None
        work = max(op.flops / link.flops_rate, op.traffic_bytes / link.memory_bandwidth) * strategy.compute_share
        seconds += problem.microbatches * work * (4 if layer is not None else 3)
        for source, state in zip(op.inputs, strategy.inputs, strict=True):
            if conversion(chosen[source].output, state) is None:
                return None
            conversions.add((source, state, None))
            if layer is not None:
                conversions.add((source, state, layer))
                if layers[source] != layer and not ops[source].param:
                    entered.add((source, layer))
        size = prod(op.shape) * op.element_bytes
        if op.param:
            memory += prod(op.shape) * problem.param_bytes * share[reader]
            if str(strategy.output) == "B":
                seconds += 2 * size * (link.size - 1) / link.size / link.bandwidth
        if layer is None or layer == min(number for number in layers if number is not None):
            weights = [0 if ops[i].param else prod(ops[i].shape) * ops[i].element_bytes for i in op.inputs]
            shares = [1 / link.size if state.kind == "S" else 1.0 for state in strategy.inputs]
            read = sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights) if sum(weights) else None
            memory += op.saved_bytes * (share[reader] if read is None else read)
    for source, state, layer in conversions:
        found = conversion(chosen[source].output, state)
        assert found is not None
        size = prod(ops[source].shape) * ops[source].element_bytes
        once = collective_seconds(found.forward, size, link)
        once += collective_seconds(found.backward, size, link) if layer is None else 0.0
        seconds += problem.microbatches * once
    memory += sum(prod(ops[i].shape) * ops[i].element_bytes * share[i] for i in {source for source, _ in entered})
    return seconds, memory


def all_prices(
    problem: ShardingProblem,
    link: AxisLink,
    *,
    fixed: Mapping[int, Sharding] | None = None,
    recomputed: Collection[int] = (),
) -> Iterator[tuple[float, float]]:
    """Yield the price of every legal assignment."""
    firsts = sorted(set(problem.first_copies))
    for choice in product(*(range(len(problem.ops[first].strategies)) for first in firsts)):
        by_first = dict(zip(firsts, choice, strict=True))
        strategies = tuple(by_first[first] for first in problem.first_copies)
        outputs = [op.strategies[number].output for op, number in zip(problem.ops, strategies, strict=True)]
        if all(outputs[position] == state for position, state in (fixed or {}).items()):
            found = price(problem, strategies, link, recomputed)
            if found is not None:
                yield found
