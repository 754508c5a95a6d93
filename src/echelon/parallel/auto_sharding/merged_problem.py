"""A sharding problem with equal layers merged: one choice per operator, the cost of all its copies in it. No torch.

[Note: merged problem]

Operators at the same place of equal layers share one choice. What remains is a sum over choices and over shared
conversions, and everything that the search minimizes or bounds is linear in these two:

    op_cost[u][s]              operator u runs strategy s, in all its copies; its part of the step's partial gradients
    op_memory[u][s]            its parameter, its saved tensors
    group_seconds[g][o, t]     a producer left its result in o, and some reader of group g wants it in t

A conversion group is a set of edges that share conversions: all readers of one copy of a producer. Copies with the
same readers are one group with a multiplied cost. The last layer's result has other readers than those before it, so
it makes a group of its own. A recomputed layer converts what it reads a second time, in forward only: one more group
per producer, whose edges are the readers in that layer.

Memory with recomputed layers: such a layer saves only what it reads of others (one tensor per producer, in the state
in which the producer left it), and one layer at a time has all its saved tensors back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from echelon.parallel.auto_sharding.cost import (
    conversion_seconds,
    local_share,
    param_state_bytes,
    result_bytes,
    saved_activation_bytes,
    step_cost,
)
from echelon.parallel.auto_sharding.sharding import ShardableOp, Sharding, conversion
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingCost, ShardingProblem


@dataclass(frozen=True, order=True)
class MergedEdge:
    """An input of an operator, in all copies that read the same producer."""

    producer: int
    """position among the merged operators, as `reader`"""
    reader: int
    slot: int
    """which of the reader's inputs"""


@dataclass(frozen=True)
class ConversionGroup:
    """Edges of one producer that share their conversions."""

    producer: int
    edges: tuple[int, ...]
    """positions among the merged edges"""
    seconds: dict[tuple[Sharding, Sharding], float]
    """of converting from one state to another in a step; pairs that cost nothing are missing"""


@dataclass(frozen=True)
class MergedProblem:
    """The first copies of a problem's operators, see [Note: merged problem]."""

    ops: tuple[ShardableOp, ...]
    positions: tuple[int, ...]
    """of each operator in the problem"""
    edges: tuple[MergedEdge, ...]
    groups: tuple[ConversionGroup, ...]
    op_cost: tuple[tuple[ShardingCost, ...], ...]
    """seconds in a step of each operator's strategies"""
    op_memory: tuple[tuple[float, ...], ...]
    """bytes on a rank of each operator's strategies"""

    def evaluate(self, choice: Sequence[int]) -> tuple[ShardingCost, float]:
        """Return the seconds of a step and the bytes on a rank of a strategy for each operator."""
        cost, memory = ShardingCost(), 0.0
        for costs, bytes_, chosen in zip(self.op_cost, self.op_memory, choice, strict=True):
            cost, memory = cost + costs[chosen], memory + bytes_[chosen]
        seconds = 0.0
        for group in self.groups:
            source = self.ops[group.producer].strategies[choice[group.producer]].output
            targets = {self.input_state(self.edges[edge], choice) for edge in group.edges}
            seconds += sum(group.seconds.get((source, target), 0.0) for target in targets)
        return cost + ShardingCost(collectives=seconds), memory

    def input_state(self, edge: MergedEdge, choice: Sequence[int]) -> Sharding:
        """Return the state in which an edge's reader wants its input."""
        return self.ops[edge.reader].strategies[choice[edge.reader]].inputs[edge.slot]

    @cached_property
    def edges_of(self) -> tuple[tuple[int, ...], ...]:
        """The edges at each operator, as producer or reader."""
        found: list[list[int]] = [[] for _ in self.ops]
        for number, edge in enumerate(self.edges):
            for end in {edge.producer, edge.reader}:
                found[end].append(number)
        return tuple(tuple(numbers) for numbers in found)


def merge(problem: ShardingProblem, link: AxisLink, recomputed_layers: Collection[int] = ()) -> MergedProblem:
    """Merge the copies of a problem's operators; forward of `recomputed_layers` runs a second time."""
    return _Merging(problem, link, recomputed_layers).merged_problem()


class _Merging:
    """A problem's operators by the merged operator and the recomputed layer that they belong to."""

    def __init__(self, problem: ShardingProblem, link: AxisLink, recomputed_layers: Collection[int]):
        self._problem, self._link = problem, link
        self._positions = tuple(sorted(set(problem.first_copies)))
        number_of = {position: number for number, position in enumerate(self._positions)}
        self._merged = [number_of[first] for first in problem.first_copies]
        self._layers = [number if number in recomputed_layers else None for number in problem.layer_numbers]
        """the recomputed layer of each operator; None where it is not recomputed"""
        inputs = [
            (source, reader, slot) for reader, op in enumerate(problem.ops) for slot, source in enumerate(op.inputs)
        ]
        ends = {(self._merged[source], self._merged[reader], slot) for source, reader, slot in inputs}
        self._edges = tuple(MergedEdge(*end) for end in sorted(ends))
        number_of_edge = {edge: number for number, edge in enumerate(self._edges)}
        self._readers: list[list[tuple[int, int]]] = [[] for _ in problem.ops]
        """of each operator's result: the merged edge and the position of the reader"""
        for source, reader, slot in inputs:
            edge = MergedEdge(self._merged[source], self._merged[reader], slot)
            self._readers[source].append((number_of_edge[edge], reader))

    def merged_problem(self) -> MergedProblem:
        costs: list[list[list[ShardingCost]]] = [[] for _ in self._positions]
        memory: list[list[list[float]]] = [[] for _ in self._positions]
        for position, number in enumerate(self._merged):
            copy_costs, copy_memory = self._op_costs(position)
            costs[number].append(copy_costs)
            memory[number].append(copy_memory)
        return MergedProblem(
            ops=tuple(self._problem.ops[position] for position in self._positions),
            positions=self._positions,
            edges=self._edges,
            groups=self._conversion_groups(),
            op_cost=tuple(tuple(sum(x, ShardingCost()) for x in zip(*copies, strict=True)) for copies in costs),
            op_memory=tuple(tuple(sum(x) for x in zip(*copies, strict=True)) for copies in memory),
        )

    def _op_costs(self, position: int) -> tuple[list[ShardingCost], list[float]]:
        """Return seconds and bytes of each strategy of one copy of an operator."""
        problem, ranks = self._problem, self._link.size
        op, layer = problem.ops[position], self._layers[position]
        entered = () if op.param else {self._layers[reader] for _, reader in self._readers[position]} - {None, layer}
        input_bytes = tuple(0 if problem.ops[i].param else result_bytes(problem.ops[i]) for i in op.inputs)
        costs, memory = [], []
        for strategy in op.strategies:
            costs.append(step_cost(op, strategy, self._link, problem.microbatches, layer is not None))
            held = param_state_bytes(op, strategy, ranks, problem.param_bytes)
            # One recomputed layer at a time has its saved tensors back: the first stands for it.
            if layer in (None, self._first_recomputed):
                held += saved_activation_bytes(op, strategy, ranks, input_bytes)
            if entered:
                held += result_bytes(op) * local_share(strategy.output, ranks)
            memory.append(held)
        return costs, memory

    @cached_property
    def _first_recomputed(self) -> int | None:
        return min((layer for layer in self._layers if layer is not None), default=None)

    def _conversion_groups(self) -> tuple[ConversionGroup, ...]:
        """Return the groups of readers that share conversions, equal ones merged."""
        counts: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(lambda: [0, 0])  # forwards, backwards
        for producer, readers in zip(self._merged, self._readers, strict=True):
            again: dict[int, set[int]] = defaultdict(set)
            for edge, reader in readers:
                if (layer := self._layers[reader]) is not None:
                    again[layer].add(edge)
            if readers:
                count = counts[producer, tuple(sorted({edge for edge, _ in readers}))]
                count[:] = count[0] + 1, count[1] + 1
            for edges in again.values():
                counts[producer, tuple(sorted(edges))][0] += 1
        return tuple(
            ConversionGroup(producer, edges, self._group_seconds(producer, edges, forwards, backwards))
            for (producer, edges), (forwards, backwards) in sorted(counts.items())
        )

    def _group_seconds(
        self, producer: int, edges: tuple[int, ...], forwards: int, backwards: int
    ) -> dict[tuple[Sharding, Sharding], float]:
        """Return the seconds of a step of the conversions that cost something."""
        op = self._problem.ops[self._positions[producer]]
        targets = {
            strategy.inputs[self._edges[edge].slot]
            for edge in edges
            for strategy in self._problem.ops[self._positions[self._edges[edge].reader]].strategies
        }
        seconds: dict[tuple[Sharding, Sharding], float] = {}
        for source, target in product(sorted({strategy.output for strategy in op.strategies}), sorted(targets)):
            if conversion(source, target):
                forward, backward = conversion_seconds(op, source, target, self._link)
                if total := (forwards * forward + backwards * backward) * self._problem.microbatches:
                    seconds[source, target] = total
        return seconds
