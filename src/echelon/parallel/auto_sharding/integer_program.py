"""The integer program of a merged sharding problem, solved by HiGHS. No torch.

[Note: integer program]

    x[u, s]       binary   operator u runs strategy s
    e[p, r, o, t] in [0,1] an edge: producer p leaves o, and reader r wants t
    y[g, o, t]    in [0,1] group g converts its producer's result from o to t

    minimize    sum op_cost[u][s] x[u, s]  +  sum group_seconds[g][o, t] y[g, o, t]
    subject to  sum over s of x[u, s] = 1                                      one strategy
                sum over t of e[p, r, o, t] = sum of x[p, s] with output o     an edge carries its producer's state
                sum over o of e[p, r, o, t] = sum of x[r, s] with input t      and its reader's
                e[p, r, o, t] <= y[g, o, t] of every group g with the edge     one conversion serves all of a group
                sum op_memory[u][s] x[u, s] <= memory cap

Only x needs to be integer: it decides e, and the costs push y down to the largest e. Pairs of states that nothing
converts have no variable. An edge is a transport from outputs to inputs, whose relaxation is integral along a chain:
what HiGHS has to branch on are the places where several edges share a conversion, and the memory cap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

from echelon.parallel.auto_sharding.legal_strategies import Domains
from echelon.parallel.auto_sharding.merged_problem import MergedProblem
from echelon.parallel.auto_sharding.sharding import Sharding, conversion

OBJECTIVE_SCALE = 1e4
"""what the spread of all costs becomes, far above the tolerances of the solver"""
MEMORY_TIE_BREAK, ORDER_TIE_BREAK = 1e-3, 1e-5
"""at most added to the costs: of solutions of equal time, that of the least memory, as a row-parallel linear saves
a slice of its input where a column-parallel one saves all; of these, that of the first strategies"""
TOLERANCE = 1e-9


@dataclass(frozen=True)
class ProgramResult:
    """The answer of HiGHS."""

    choice: tuple[int, ...] | None
    """a strategy for each merged operator; None: it found none"""
    optimal: bool = False
    infeasible: bool = False


def is_installed() -> bool:
    """Return whether highspy is."""
    return find_spec("highspy") is not None


def solve_program(
    merged: MergedProblem,
    domains: Domains,
    *,
    memory_cap: float | None,
    time_limit_s: float,
    minimize_memory: bool = False,
) -> ProgramResult:
    """Solve the integer program over the strategies that `domains` leaves; one thread and a fixed seed."""
    return _Program(merged, domains, memory_cap, minimize_memory).solve(time_limit_s)


class _Program:
    """Columns and rows of [Note: integer program]."""

    def __init__(self, merged: MergedProblem, domains: Domains, memory_cap: float | None, minimize_memory: bool):
        self._merged, self._domains = merged, domains
        self._costs: list[float] = []
        self._entries: list[tuple[list[int], list[float]]] = []
        self._bounds: list[tuple[float, float]] = []
        self._x = [self._strategy_columns(number, minimize_memory) for number in range(len(domains))]
        self._num_integers = len(self._costs)
        for columns in self._x:
            self._add_row(columns.values(), 1.0)
        group_seconds = defaultdict(list)
        if not minimize_memory:
            for group in merged.groups:
                for edge in group.edges:
                    group_seconds[edge].append(group.seconds)
        self._e = [self._edge_columns(number, group_seconds[number]) for number in range(len(merged.edges))]
        if not minimize_memory:
            self._add_conversions()
        if memory_cap is not None:
            pairs = [(x, merged.op_memory[u][s] / memory_cap) for u, row in enumerate(self._x) for s, x in row.items()]
            self._entries.append(([x for x, _ in pairs], [share for _, share in pairs]))
            self._bounds.append((-np.inf, 1.0))

    def _strategy_columns(self, op: int, minimize_memory: bool) -> dict[int, int]:
        """Add x of one operator; what all its strategies cost is left out."""
        weights = self._merged.op_memory[op] if minimize_memory else [cost.total for cost in self._merged.op_cost[op]]
        least = min(weights[strategy] for strategy in self._domains[op])
        return {strategy: self._add_column(weights[strategy] - least) for strategy in self._domains[op]}

    def _edge_columns(
        self, number: int, group_seconds: list[dict[tuple[Sharding, Sharding], float]]
    ) -> dict[tuple[Sharding, Sharding], int]:
        """Add e of one edge, unless every pair of its states converts for nothing."""
        edge = self._merged.edges[number]
        outputs, inputs = defaultdict(list), defaultdict(list)
        for strategy, column in self._x[edge.producer].items():
            outputs[self._merged.ops[edge.producer].strategies[strategy].output].append(column)
        for strategy, column in self._x[edge.reader].items():
            inputs[self._merged.ops[edge.reader].strategies[strategy].inputs[edge.slot]].append(column)
        pairs = [pair for pair in product(sorted(outputs), sorted(inputs)) if conversion(*pair)]
        is_free = not any(seconds.get(pair) for seconds in group_seconds for pair in pairs)
        if is_free and len(pairs) == len(outputs) * len(inputs):
            return {}
        columns = {pair: self._add_column(0.0) for pair in pairs}
        for end, states in enumerate((outputs, inputs)):
            for state, chosen in states.items():
                self._add_row([e for pair, e in columns.items() if pair[end] == state], 0.0, minus=chosen)
        return columns

    def _add_conversions(self) -> None:
        """Add y of every group; a conversion that only one edge wants is e itself."""
        for group in self._merged.groups:
            for pair, seconds in group.seconds.items():
                edges = [self._e[number][pair] for number in group.edges if pair in self._e[number]]
                if len(edges) == 1:
                    self._costs[edges[0]] += seconds
                elif edges:
                    y = self._add_column(seconds)
                    for e in edges:
                        self._entries.append(([e, y], [1.0, -1.0]))
                        self._bounds.append((-np.inf, 0.0))

    def _add_column(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _add_row(self, plus: Iterable[int], equals: float, minus: Iterable[int] = ()) -> None:
        """Add the equation that some columns less others are a number."""
        # A self-edge has its strategies on both sides.
        values: dict[int, float] = defaultdict(float)
        for column in plus:
            values[column] += 1.0
        for column in minus:
            values[column] -= 1.0
        self._entries.append((list(values), list(values.values())))
        self._bounds.append((equals, equals))

    def solve(self, time_limit_s: float) -> ProgramResult:
        import highspy

        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "threads": 1,
            "parallel": "off",
            "random_seed": 0,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": TOLERANCE,
            "mip_feasibility_tolerance": TOLERANCE,
            "primal_feasibility_tolerance": TOLERANCE,
            "time_limit": max(time_limit_s, 0.0),
        }
        solver = highspy.Highs()
        for option, value in options.items():
            solver.setOptionValue(option, value)
        solver.passModel(self._linear_program(highspy))
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return ProgramResult(None, infeasible=True)
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return ProgramResult(None)
        values = solver.getSolution().col_value
        choice = tuple(max(columns, key=lambda strategy: values[columns[strategy]]) for columns in self._x)
        return ProgramResult(choice, optimal=status == highspy.HighsModelStatus.kOptimal)

    def _linear_program(self, highspy: Any) -> Any:
        costs = np.array(self._costs)
        costs *= OBJECTIVE_SCALE / (costs.sum() or 1.0)
        most = sum(map(max, self._merged.op_memory)) or 1.0
        for memory, columns in zip(self._merged.op_memory, self._x, strict=True):
            for rank, (strategy, column) in enumerate(columns.items()):
                costs[column] += MEMORY_TIE_BREAK * memory[strategy] / most
                costs[column] += ORDER_TIE_BREAK * rank / self._num_integers
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(costs), len(self._bounds)
        program.col_cost_ = costs
        program.col_lower_, program.col_upper_ = np.zeros(len(costs)), np.ones(len(costs))
        program.row_lower_ = np.array([low for low, _ in self._bounds])
        program.row_upper_ = np.array([high for _, high in self._bounds])
        integer, continuous = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        others = len(costs) - self._num_integers
        program.integrality_ = [integer] * self._num_integers + [continuous] * others
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0, *(len(columns) for columns, _ in self._entries)])
        program.a_matrix_.index_ = np.array([column for columns, _ in self._entries for column in columns])
        program.a_matrix_.value_ = np.array([value for _, values in self._entries for value in values])
        return program
