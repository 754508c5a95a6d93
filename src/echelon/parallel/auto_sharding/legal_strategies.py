"""Which strategies can still be part of a solution, and one assignment of them that is legal. No torch.

Before the search: an operator that is fixed to a state keeps the strategies with this output, the result of the model
those that end replicated. A strategy goes when no producer can leave its input in a state that converts to the one it
wants, or a reader finds no use for its output (arc consistency), and when another with the same inputs and output
costs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from echelon.parallel.auto_sharding.merged_problem import MergedEdge, MergedProblem
from echelon.parallel.auto_sharding.sharding import REPLICATE, Sharding, Strategy, conversion

Domains = tuple[tuple[int, ...], ...]
"""the strategies that each merged operator may still take"""
MAX_BACKTRACKS = 20_000
"""assignments that are tried before the search for a legal one ends"""


def initial_domains(merged: MergedProblem, fixed: Iterable[tuple[int, Sharding]]) -> Domains:
    """Return the strategies that outputs allow, of which none is dominated by another."""
    wanted: list[set[Sharding]] = [{REPLICATE} if op.op == "output" else set() for op in merged.ops]
    for number, state in fixed:
        wanted[number].add(state)
    found = []
    for op, states, costs in zip(merged.ops, wanted, merged.op_cost, strict=True):
        best: dict[tuple[tuple[Sharding, ...], Sharding], int] = {}
        for number, strategy in enumerate(op.strategies):
            key = strategy.inputs, strategy.output
            if states <= {strategy.output} and (key not in best or costs[number].total < costs[best[key]].total):
                best[key] = number
        found.append(tuple(sorted(best.values())))
    return tuple(found)


def consistent(merged: MergedProblem, domains: Domains) -> Domains | None:
    """Remove strategies for which a neighbour has no partner; None where an operator has none left."""
    return _propagate(merged, domains, range(len(merged.edges)))


def _propagate(merged: MergedProblem, domains: Domains, edges: Iterable[int]) -> Domains | None:
    current = list(domains)
    if not all(current):
        return None
    waiting = dict.fromkeys(edges)
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        edge = merged.edges[number]
        for end, kept in zip((edge.producer, edge.reader), _partners(merged, current, edge), strict=True):
            if len(kept) < len(current[end]):
                if not kept:
                    return None
                current[end] = kept
                waiting.update(dict.fromkeys(merged.edges_of[end]))
    return tuple(current)


def _partners(
    merged: MergedProblem, domains: Sequence[tuple[int, ...]], edge: MergedEdge
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the strategies of an edge's producer and reader that have a partner at the other end."""
    producer, reader = merged.ops[edge.producer].strategies, merged.ops[edge.reader].strategies
    if edge.producer == edge.reader:
        own = tuple(
            number
            for number in domains[edge.reader]
            if conversion(producer[number].output, reader[number].inputs[edge.slot])
        )
        return own, own
    outputs = {producer[number].output for number in domains[edge.producer]}
    inputs = {reader[number].inputs[edge.slot] for number in domains[edge.reader]}
    useful = {output for output in outputs if any(conversion(output, state) for state in inputs)}
    reached = {state for state in inputs if any(conversion(output, state) for output in outputs)}
    return (
        tuple(number for number in domains[edge.producer] if producer[number].output in useful),
        tuple(number for number in domains[edge.reader] if reader[number].inputs[edge.slot] in reached),
    )


def legal_assignment(merged: MergedProblem, domains: Domains) -> tuple[int, ...] | None:
    """Return one legal assignment, replicated where it can be; None where there is none.

    Depth first, with arc consistency after every choice. It tries replicated strategies first: without fixed states
    no choice is ever taken back.
    """
    start = consistent(merged, domains)
    stack = [start] if start else []
    for _ in range(MAX_BACKTRACKS):
        if not stack:
            return None
        current = stack.pop()
        open_ops = [number for number, domain in enumerate(current) if len(domain) > 1]
        if not open_ops:
            return tuple(domain[0] for domain in current)
        first = open_ops[0]
        strategies = merged.ops[first].strategies
        ordered = sorted(current[first], key=lambda number: (_sharded_states(strategies[number]), number))
        for number in reversed(ordered):
            narrowed = (*current[:first], (number,), *current[first + 1 :])
            if (found := _propagate(merged, narrowed, merged.edges_of[first])) is not None:
                stack.append(found)
    raise ValueError(
        f"no legal sharding in {MAX_BACKTRACKS:,} assignments; fix the states of fewer operators or parameters"
    )


def _sharded_states(strategy: Strategy) -> int:
    return sum(state != REPLICATE for state in (*strategy.inputs, strategy.output))


def conflicting_states(merged: MergedProblem, fixed: Mapping[int, Sharding]) -> dict[int, Sharding]:
    """Return a minimal part of the fixed states that no assignment meets: without any of it, one does."""
    needed = dict(fixed)
    for number in fixed:
        others = {other: state for other, state in needed.items() if other != number}
        if legal_assignment(merged, initial_domains(merged, others.items())) is None:
            needed = others
    return needed
