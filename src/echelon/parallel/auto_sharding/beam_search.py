"""A beam search over a merged sharding problem, for when the integer program has no answer in time. No torch.

Operators are decided in order. Of partial assignments that look the same to everything that is still open (outputs
with readers to come, the states these were converted to already, inputs whose producer is to come) only the cheapest
stays, which is the dynamic program along the graph. Of the different ones, these are the `BEAM_WIDTH` cheapest, with
what the open conversions cost at least: a partial sum has its all-reduce before it. The search starts no thread and
knows no clock: the same problem has the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from echelon.parallel.auto_sharding.legal_strategies import Domains, legal_assignment
from echelon.parallel.auto_sharding.merged_problem import ConversionGroup, MergedProblem
from echelon.parallel.auto_sharding.sharding import Sharding, conversion

BEAM_WIDTH = 64
MEMORY_PRICES = (1000.0, 0.0, 1.0)
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


class _Beam:
    """One pass over the operators, at `memory_price` seconds per byte."""

    def __init__(self, merged: MergedProblem, domains: Domains, memory_price: float):
        self._merged, self._domains, self._memory_price = merged, domains, memory_price
        self._groups_at: list[list[int]] = [[] for _ in merged.ops]
        for number, group in enumerate(merged.groups):
            for end in {group.producer, *(merged.edges[edge].reader for edge in group.edges)}:
                self._groups_at[end].append(number)

        self._outputs = [
            {op.strategies[strategy].output for strategy in domain}
            for op, domain in zip(merged.ops, domains, strict=True)
        ]
        self._inputs = [
            {merged.ops[edge.reader].strategies[strategy].inputs[edge.slot] for strategy in domains[edge.reader]}
            for edge in merged.edges
        ]

    def search(self) -> list[tuple[int, ...]]:
        """Return the complete assignments that remain, the cheapest first; none where the beam lost them."""
        beam = [_PartialAssignment(0.0, ())]
        for op in range(len(self._merged.ops)):
            open_groups = [
                group
                for group in self._merged.groups
                if self._is_open(group.producer, [self._merged.edges[edge].reader for edge in group.edges], op)
            ]
            best: dict[tuple[object, ...], _PartialAssignment] = {}
            for partial in beam:
                for strategy in self._domains[op]:
                    choice = (*partial.choice, strategy)
                    if not self._is_legal(choice):
                        continue
                    cost = partial.cost + self._added_cost(choice)
                    key = tuple(self._open_states(group.producer, group.edges, choice) for group in open_groups)
                    if key not in best or cost < best[key].cost:
                        least = sum(self._least_open_cost(group, choice) for group in open_groups)
                        best[key] = _PartialAssignment(cost, choice, least)
            beam = sorted(best.values(), key=lambda p: (p.cost + p.open_cost, p.choice))[:BEAM_WIDTH]
        return [partial.choice for partial in beam]

    @staticmethod
    def _is_open(producer: int, readers: list[int], op: int) -> bool:
        """Return whether a group has both decided and undecided operators after `op`."""
        ends = (producer, *readers)
        return min(ends) <= op < max(ends)

    def _open_states(self, producer: int, edges: tuple[int, ...], choice: tuple[int, ...]) -> tuple[object, ...]:
        """Return what later choices see of a group: the producer's output, and the states that it converts to."""
        output = self._output(producer, choice) if producer < len(choice) else None
        return output, self._targets(edges, choice)

    def _is_legal(self, choice: tuple[int, ...]) -> bool:
        """Return whether the last choice converts to and from its decided neighbours."""
        for number in self._merged.edges_of[len(choice) - 1]:
            edge = self._merged.edges[number]
            if max(edge.producer, edge.reader) < len(choice):
                target = self._merged.input_state(edge, choice)
                if conversion(self._output(edge.producer, choice), target) is None:
                    return False
        return True

    def _added_cost(self, choice: tuple[int, ...]) -> float:
        """Return what the last choice adds: its own cost, and the conversions that nothing decided wanted yet."""
        op, before = len(choice) - 1, choice[:-1]
        cost = self._merged.op_cost[op][choice[-1]].total
        cost += self._memory_price * self._merged.op_memory[op][choice[-1]]
        for number in self._groups_at[op]:
            group = self._merged.groups[number]
            if group.producer < len(choice):
                output = self._output(group.producer, choice)
                targets = self._targets(group.edges, choice)
                if group.producer < op:
                    targets -= self._targets(group.edges, before)
                cost += sum(group.seconds.get((output, target), 0.0) for target in targets)
        return cost

    def _least_open_cost(self, group: ConversionGroup, choice: tuple[int, ...]) -> float:
        """Return what a group's undecided operators add to its conversions at least."""
        paid = self._targets(group.edges, choice)
        if group.producer >= len(choice):
            outputs = self._outputs[group.producer]
            return min(sum(group.seconds.get((output, target), 0.0) for target in paid) for output in outputs)
        output = self._output(group.producer, choice)
        least = 0.0
        for number in group.edges:
            if self._merged.edges[number].reader >= len(choice):
                wanted = [state for state in self._inputs[number] if conversion(output, state)]
                costs = [0.0 if state in paid else group.seconds.get((output, state), 0.0) for state in wanted]
                least = max(least, min(costs, default=inf))
        return least

    def _output(self, op: int, choice: tuple[int, ...]) -> Sharding:
        return self._merged.ops[op].strategies[choice[op]].output

    def _targets(self, edges: tuple[int, ...], choice: tuple[int, ...]) -> frozenset[Sharding]:
        """Return the states in which decided readers want a producer's result."""
        found = (self._merged.edges[number] for number in edges)
        return frozenset(self._merged.input_state(edge, choice) for edge in found if edge.reader < len(choice))
