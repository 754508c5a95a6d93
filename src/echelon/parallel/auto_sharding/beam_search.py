"""A beam search over a merged sharding problem, for when the integer program has no answer in time. No torch.

Operators are decided in order. Of partial assignments that look the same to everything that is still open (outputs
with readers to come, the states these were converted to already, inputs whose producer is to come) only the cheapest
stays, which is the dynamic program along the graph. Of the different ones, these are the `BEAM_WIDTH` cheapest, with
what the open conversions cost at least: a partial sum has its all-reduce before it. The search starts no thread and
knows no clock: the same problem has the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf

from echelon.parallel.auto_sharding.legal_strategies import Domains, legal_assignment
from echelon.parallel.auto_sharding.merged_problem import MergedProblem
from echelon.parallel.auto_sharding.sharding import conversion

BEAM_WIDTH = 64
MEMORY_PRICES = (1000.0, 0.0, 1.0, 10.0)
"""what the whole memory cap costs, in times the seconds of a step: first as little memory as possible"""


def beam_search(merged: MergedProblem, domains: Domains, memory_cap: float | None) -> tuple[int, ...] | None:
    """Return a legal assignment of low cost within the memory cap; None where the search found none."""
    legal = legal_assignment(merged, domains)
    if legal is None:
        return None
    choices = [legal]
    for price in MEMORY_PRICES if memory_cap else (0.0,):
        scale = price * merged.evaluate(legal)[0].total / (memory_cap or 1.0)
        choices += _Beam(merged, domains, scale).search()
        choices = [choice for choice in choices if memory_cap is None or merged.evaluate(choice)[1] <= memory_cap]
        if not choices:
            return None
    return min(choices, key=lambda choice: (merged.evaluate(choice)[0].total, choice))


@dataclass(frozen=True)
class _PartialAssignment:
    cost: float
    choice: tuple[int, ...]
    open_cost: float = 0.0
    """a lower bound on the conversions between decided operators and others"""


@dataclass(frozen=True)
class _Group:
    """A conversion group, with states as numbers."""

    producer: int
    edges: tuple[tuple[int, list[int]], ...]
    """the reader of each, and the state in which each of its strategies wants the input"""
    seconds: dict[tuple[int, int], float]
    wanted: tuple[set[int], ...]
    """the states that each edge's reader may still want"""

    def targets(self, choice: tuple[int, ...]) -> frozenset[int]:
        """Return the states in which decided readers want the producer's result."""
        count = len(choice)
        return frozenset([states[choice[reader]] for reader, states in self.edges if reader < count])


class _Beam:
    """One pass over the operators, at `memory_price` seconds per byte."""

    def __init__(self, merged: MergedProblem, domains: Domains, memory_price: float):
        self._merged, self._domains = merged, domains
        self._costs = [
            [cost.total + memory_price * bytes_ for cost, bytes_ in zip(costs, memory, strict=True)]
            for costs, memory in zip(merged.op_cost, merged.op_memory, strict=True)
        ]
        all_states = {s for op in merged.ops for strategy in op.strategies for s in (*strategy.inputs, strategy.output)}
        number = {state: place for place, state in enumerate(sorted(all_states))}
        self._legal = {(number[a], number[b]) for a, b in product(all_states, repeat=2) if conversion(a, b) is not None}
        self._outputs = [[number[strategy.output] for strategy in op.strategies] for op in merged.ops]
        inputs = [
            [number[strategy.inputs[edge.slot]] for strategy in merged.ops[edge.reader].strategies]
            for edge in merged.edges
        ]
        self._edges_at: list[list[tuple[int, int, list[int]]]] = [[] for _ in merged.ops]
        """the edges that are decided with each operator: producer, reader, states"""
        for edge, states in zip(merged.edges, inputs, strict=True):
            self._edges_at[max(edge.producer, edge.reader)].append((edge.producer, edge.reader, states))
        self._open_groups: list[list[_Group]] = [[] for _ in merged.ops]
        """the groups of which some operators are decided and some are not, after each operator"""
        self._groups_at: list[list[_Group]] = [[] for _ in merged.ops]
        for found in merged.groups:
            edges = tuple((merged.edges[edge].reader, inputs[edge]) for edge in found.edges)
            ends = {found.producer, *(reader for reader, _ in edges)}
            wanted = tuple({states[strategy] for strategy in domains[reader]} for reader, states in edges)
            seconds = {(number[a], number[b]): value for (a, b), value in found.seconds.items()}
            group = _Group(found.producer, edges, seconds, wanted)
            for op in ends:
                self._groups_at[op].append(group)
            for op in range(min(ends), max(ends)):
                self._open_groups[op].append(group)

    def search(self) -> list[tuple[int, ...]]:
        """Return the complete assignments that remain, the cheapest first; none where the beam lost them."""
        beam = [_PartialAssignment(0.0, ())]
        for op, domain in enumerate(self._domains):
            best: dict[tuple[object, ...], _PartialAssignment] = {}
            for partial, strategy in product(beam, domain):
                choice = (*partial.choice, strategy)
                if self._is_legal(choice):
                    cost = partial.cost + self._added_cost(choice)
                    key = tuple([self._open_states(group, choice) for group in self._open_groups[op]])
                    if key not in best or cost < best[key].cost:
                        least = sum(self._least_open_cost(group, choice) for group in self._open_groups[op])
                        best[key] = _PartialAssignment(cost, choice, least)
            beam = sorted(best.values(), key=lambda p: (p.cost + p.open_cost, p.choice))[:BEAM_WIDTH]
        return [partial.choice for partial in beam]

    def _open_states(self, group: _Group, choice: tuple[int, ...]) -> tuple[object, ...]:
        """Return what later choices see of a group: the producer's output, and the states that it converts to."""
        decided = group.producer < len(choice)
        return self._outputs[group.producer][choice[group.producer]] if decided else None, group.targets(choice)

    def _is_legal(self, choice: tuple[int, ...]) -> bool:
        """Return whether the last choice converts to and from its decided neighbours."""
        return all(
            (self._outputs[producer][choice[producer]], states[choice[reader]]) in self._legal
            for producer, reader, states in self._edges_at[len(choice) - 1]
        )

    def _added_cost(self, choice: tuple[int, ...]) -> float:
        """Return what the last choice adds: its own cost, and the conversions that nothing decided wanted yet."""
        op, before = len(choice) - 1, choice[:-1]
        cost = self._costs[op][choice[-1]]
        for group in self._groups_at[op]:
            if group.producer <= op:
                output = self._outputs[group.producer][choice[group.producer]]
                targets = group.targets(choice)
                if group.producer < op:
                    targets -= group.targets(before)
                cost += sum([group.seconds.get((output, target), 0.0) for target in targets])
        return cost

    def _least_open_cost(self, group: _Group, choice: tuple[int, ...]) -> float:
        """Return what a group's undecided operators add to its conversions at least."""
        paid = group.targets(choice)
        if group.producer >= len(choice):
            outputs = {self._outputs[group.producer][strategy] for strategy in self._domains[group.producer]}
            return min(sum([group.seconds.get((output, target), 0.0) for target in paid]) for output in outputs)
        output = self._outputs[group.producer][choice[group.producer]]
        least = 0.0
        for (reader, _), wanted in zip(group.edges, group.wanted, strict=True):
            if reader >= len(choice):
                states = [state for state in wanted if (output, state) in self._legal]
                costs = [0.0 if state in paid else group.seconds.get((output, state), 0.0) for state in states]
                least = max(least, min(costs, default=inf))
        return least
