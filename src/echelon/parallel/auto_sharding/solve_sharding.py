"""`solve`: the cheapest strategy of every operator of a problem, under a memory cap. No torch.

Without a cap nothing is recomputed, and one integer program has the answer. Where that does not fit, the program is
solved for each choice of recomputed layers (none, an eighth of them, up to all) with the cap as a constraint, and the
cheapest that fits wins: what recomputing a layer costs depends on its sharding, so the two are chosen together. A
choice whose cheapest recomputation already costs more than the best so far is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from echelon.parallel.auto_sharding.beam_search import beam_search
from echelon.parallel.auto_sharding.integer_program import ProgramResult, is_installed, solve_program
from echelon.parallel.auto_sharding.legal_strategies import (
    Domains,
    conflicting_states,
    consistent,
    initial_domains,
    legal_assignment,
)
from echelon.parallel.auto_sharding.merged_problem import MergedProblem, merge
from echelon.parallel.auto_sharding.sharding import Sharding
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem, ShardingSolution

GIB = 1 << 30
RECOMPUTED_PARTS = 8
"""steps from no recomputed layer to all"""


def solve(
    problem: ShardingProblem,
    link: AxisLink,
    *,
    memory_cap: float | None = None,
    time_limit_s: float = 60.0,
    fixed: Mapping[int, Sharding] | None = None,
) -> ShardingSolution:
    """Return the cheapest legal strategies within `memory_cap` bytes on a rank.

    `fixed` gives the output state of some operators, by position. The answer is the same every time, unless the time
    limit ends the search. Then, and without highspy, a beam search takes a moment more: its answer is legal but not
    proven optimal, as its note says.
    """
    if memory_cap is not None and memory_cap <= 0:
        raise ValueError(f"a memory cap needs bytes (got {memory_cap:g}); leave it out to solve without one")
    return _Search(problem, link, memory_cap, time_limit_s, fixed or {}).solution()


@dataclass(frozen=True)
class _Candidate:
    """A legal assignment of one choice of recomputed layers."""

    merged: MergedProblem
    choice: tuple[int, ...]
    recomputed: tuple[int, ...]

    @property
    def total(self) -> float:
        return self.merged.evaluate(self.choice)[0].total

    @property
    def memory_bytes(self) -> float:
        return self.merged.evaluate(self.choice)[1]


class _Search:
    """The search of one call of `solve`."""

    def __init__(
        self,
        problem: ShardingProblem,
        link: AxisLink,
        memory_cap: float | None,
        time_limit_s: float,
        fixed: Mapping[int, Sharding],
    ):
        self._problem, self._link, self._cap = problem, link, memory_cap
        self._start, self._time_limit = time.monotonic(), time_limit_s
        self._merged = merge(problem, link)
        self._domains = self._legal_domains(fixed)
        self._has_program = is_installed()
        self._is_optimal, self._from_beam = self._has_program, False

    def solution(self) -> ShardingSolution:
        best = self._cheapest(self._merged, (), None)
        assert best is not None, "a legal assignment exists"
        if self._cap is not None and best.memory_bytes > self._cap:
            best = self._cheapest_that_fits(best)
        cost, memory_bytes = best.merged.evaluate(best.choice)
        choice = dict(zip(self._merged.positions, best.choice, strict=True))
        return ShardingSolution(
            strategies=tuple(choice[first] for first in self._problem.first_copies),
            cost=cost,
            memory_bytes=memory_bytes,
            recomputed_layers=best.recomputed,
            optimal=self._is_optimal,
            seconds=time.monotonic() - self._start,
            note=self._note(),
        )

    def _legal_domains(self, fixed: Mapping[int, Sharding]) -> Domains:
        """Return the strategies that fixed states leave, or raise with those that contradict each other."""
        number_of = {position: number for number, position in enumerate(self._merged.positions)}
        by_number: dict[int, Sharding] = {}
        for position, state in fixed.items():
            op = self._problem.ops[position]
            legal = {strategy.output for strategy in op.strategies}
            number = number_of[self._problem.first_copies[position]]
            if state not in legal:
                raise ValueError(f"{op.name} has no strategy with output {state}; legal: {_listed(legal)}")
            if by_number.setdefault(number, state) != state:
                raise ValueError(
                    f"{op.name} is fixed to {by_number[number]} in one layer and {state} in another; "
                    "equal layers share a sharding: give one state"
                )
        domains = consistent(self._merged, initial_domains(self._merged, by_number.items()))
        if domains is not None and (not by_number or legal_assignment(self._merged, domains)):
            return domains
        conflict = conflicting_states(self._merged, by_number)
        if not conflict:
            raise ValueError("no legal sharding of these operators; every operator needs a strategy with all states R")
        states = ", ".join(f"{self._merged.ops[number].name}={state}" for number, state in conflict.items())
        raise ValueError(f"no legal sharding has all of these states ({states}); leave one of them to the solver")

    def _cheapest(
        self, merged: MergedProblem, recomputed: tuple[int, ...], memory_cap: float | None
    ) -> _Candidate | None:
        """Return the cheapest assignment of one choice of recomputed layers; None where none fits."""
        result = ProgramResult(None)
        if self._has_program:
            left = self._start + self._time_limit - time.monotonic()
            result = solve_program(merged, self._domains, memory_cap=memory_cap, time_limit_s=left)
            if result.infeasible:
                return None
        choices = [result.choice] if result.choice is not None else []
        if not result.optimal:
            self._is_optimal = False
            found = beam_search(merged, self._domains, memory_cap)
            choices += [found] if found is not None else []
        candidates = [_Candidate(merged, choice, recomputed) for choice in choices]
        best = min(candidates, key=lambda candidate: candidate.total, default=None)
        self._from_beam |= best is not None and best.choice != result.choice
        return best

    def _cheapest_that_fits(self, unbounded: _Candidate) -> _Candidate:
        """Return the cheapest assignment and recomputed layers within the memory cap."""
        best: _Candidate | None = None
        for recomputed in self._recomputed_choices():
            merged = merge(self._problem, self._link, recomputed) if recomputed else self._merged
            if best is None or unbounded.total + self._least_recomputation(merged) < best.total:
                found = self._cheapest(merged, recomputed, self._cap)
                best = min((c for c in (best, found) if c is not None), key=lambda c: c.total, default=None)
        return best or self._refuse_cap()

    def _recomputed_choices(self) -> Iterator[tuple[int, ...]]:
        """Yield no layer, then more of them, evenly spaced, up to all."""
        layers = self._problem.num_layers
        for count in sorted({-(-layers * part // RECOMPUTED_PARTS) for part in range(RECOMPUTED_PARTS + 1)}):
            yield tuple(number * layers // count for number in range(count))

    def _least_recomputation(self, merged: MergedProblem) -> float:
        """Return a lower bound on what recomputing costs, whatever the strategies."""
        return sum(
            min(again[number].total - once[number].total for number in domain)
            for again, once, domain in zip(merged.op_cost, self._merged.op_cost, self._domains, strict=True)
        )

    def _refuse_cap(self) -> NoReturn:
        assert self._cap is not None
        cap = f"memory cap of {self._cap / GIB:.3g} GiB"
        if not self._is_optimal:
            raise ValueError(f"found no sharding within the {cap} ({self._reason}); raise the cap or the time limit")
        least = min(self._least_memory(recomputed) for recomputed in self._recomputed_choices())
        raise ValueError(
            f"no sharding over {self._link.size} ranks fits the {cap}, whichever layers are recomputed; "
            f"the smallest needs {least / GIB:.3g} GiB: use more ranks, or a smaller microbatch"
        )

    def _least_memory(self, recomputed: tuple[int, ...]) -> float:
        merged = merge(self._problem, self._link, recomputed)
        result = solve_program(
            merged, self._domains, memory_cap=None, time_limit_s=self._time_limit, minimize_memory=True
        )
        assert result.choice is not None
        return merged.evaluate(result.choice)[1]

    def _note(self) -> str:
        if self._is_optimal:
            return ""
        source = "a beam search found this sharding" if self._from_beam else "this is the best sharding until then"
        return f"not proven optimal: {self._reason}; {source}"

    @property
    def _reason(self) -> str:
        """Why the integer program has no proof."""
        if not self._has_program:
            return "highspy is not installed (pip install 'echelon[solver]')"
        return f"the integer program ran out of time ({self._time_limit:g} s)"


def _listed(states: set[Sharding]) -> str:
    return ", ".join(str(state) for state in sorted(states))
