"""A solved sharding as a table: what runs where, what it communicates, and what stays whole. No torch.

One row per operator that computes, with all equal layers in it. A conversion stands in the row of its first reader,
as the collective runs right before it; readers behind it share the converted tensor. The seconds and bytes of the
rows are those of a step, and add up to the cost of the solution.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echelon.layout.collective import Collective, wire_bytes
from echelon.parallel.auto_sharding.cost import conversion_collectives, partial_grad_reduction, step_cost
from echelon.parallel.auto_sharding.sharding import Sharding
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem, ShardingSolution

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HEADINGS = ("operator", "op", "layers", "inputs", "parameters", "output", "share", "ms", "collectives of a step")
MAX_WHOLE_NAMES = 6


@dataclass(frozen=True, kw_only=True)
class SplitRow:
    """An operator in all its layers."""

    name: str
    """the operator's, with * for the layer"""
    op: str
    layers: int
    inputs: tuple[str, ...]
    """the state of each activation that it reads, as R->B where it is converted"""
    params: tuple[str, ...]
    """each parameter that it reads, with its state"""
    output: str
    share: float
    """of its FLOPs and memory traffic, on each rank"""
    seconds: float
    """of a step that it computes, on each rank"""
    collectives: tuple[Collective, ...]
    """of a step: conversions that it is the first to read, and the partial gradients of its parameters"""
    collective_seconds: float

    @property
    def is_whole(self) -> bool:
        """Every rank computes all of it, which takes time."""
        return self.share == 1.0 and self.seconds > 0 and self.op != "output"


@dataclass(frozen=True, kw_only=True)
class SplitTable:
    """A solution, row by row in the order of the run."""

    rows: tuple[SplitRow, ...]
    solution: ShardingSolution
    num_layers: int
    ranks: int

    @property
    def whole_rows(self) -> tuple[SplitRow, ...]:
        """The rows that every rank computes fully."""
        return tuple(row for row in self.rows if row.is_whole)

    @property
    def whole_seconds(self) -> float:
        """Seconds of a step beyond those of slices, for what stays whole."""
        return sum(row.seconds for row in self.whole_rows) * (1 - 1 / self.ranks)

    def as_text(self) -> str:
        """Return the table, and the totals under it, as plain text."""
        lines = [HEADINGS, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*table, "", *self.summary()]) + "\n"

    def summary(self) -> Iterator[str]:
        """Yield the lines under the table."""
        cost = self.solution.cost
        yield (
            f"step: {_ms(cost.total)} ms on each of {self.ranks} ranks"
            f" = compute {_ms(cost.compute)} + memory traffic {_ms(cost.traffic)} + collectives {_ms(cost.collectives)}"
        )
        recomputed = len(self.solution.recomputed_layers)
        layers = f"; {recomputed} of {self.num_layers} equal layers are recomputed" if recomputed else ""
        yield f"memory: {self.solution.memory_bytes / GIB:.2f} GiB on each rank{layers}"
        if whole := sorted(self.whole_rows, key=lambda row: -row.seconds):
            names = ", ".join(row.name for row in whole[:MAX_WHOLE_NAMES])
            more = f" and {len(whole) - MAX_WHOLE_NAMES} more" if len(whole) > MAX_WHOLE_NAMES else ""
            share = self.whole_seconds / cost.total if cost.total else 0.0
            extra = f"{_ms(self.whole_seconds)} ms of the step ({share:.1%}) more than in slices"
            yield f"stays whole: {names}{more}; {extra}"
        else:
            yield "stays whole: nothing that takes time"
        if self.solution.note:
            yield self.solution.note


def split_table(problem: ShardingProblem, solution: ShardingSolution, link: AxisLink) -> SplitTable:
    """Return the rows of a solution of `solve`."""
    copies: dict[int, list[int]] = {}
    for position, first in enumerate(problem.first_copies):
        copies.setdefault(first, []).append(position)
    issued = _issued_collectives(problem, solution, link.size)
    rows = [
        _row(problem, solution, link, positions, [item for position in positions for item in issued[position]])
        for first, positions in copies.items()
        if problem.ops[first].inputs
    ]
    return SplitTable(rows=tuple(rows), solution=solution, num_layers=problem.num_layers, ranks=link.size)


def layer_pattern(names: Sequence[str]) -> str:
    """Return the name of operators at the same place of equal layers, with * for the numbers that differ.

    >>> layer_pattern(["blocks.0.fc1", "blocks.1.fc1"])
    'blocks.*.fc1'
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    if len({tuple(part[::2]) for part in parts}) > 1:
        return names[0]
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*parts, strict=True))


def _issued_collectives(problem: ShardingProblem, solution: ShardingSolution, ranks: int) -> list[list[Collective]]:
    """Return the collectives of a step that each operator is the first to need."""
    chosen = [op.strategies[number] for op, number in zip(problem.ops, solution.strategies, strict=True)]
    issued: list[list[Collective]] = [[] for _ in problem.ops]
    converted: set[tuple[int, Sharding, int | None]] = set()
    """producer, state, and the recomputed layer that converts again"""
    reduced: set[int] = set()
    for position, op in enumerate(problem.ops):
        layer = problem.layer_numbers[position]
        passes = [None, *([layer] if layer in solution.recomputed_layers else [])]
        for source, state in zip(op.inputs, chosen[position].inputs, strict=True):
            producer = problem.ops[source]
            for again in passes:
                if (source, state, again) not in converted:
                    converted.add((source, state, again))
                    found = conversion_collectives(producer, chosen[source].output, state, ranks)
                    issued[position] += [
                        replace(item, count=problem.microbatches)
                        for item in found
                        if again is None or item.purpose == "forward"
                    ]
            if source not in reduced and (item := partial_grad_reduction(producer, chosen[source].output, ranks)):
                issued[position].append(item)
            reduced.add(source)
    return issued


def _row(
    problem: ShardingProblem,
    solution: ShardingSolution,
    link: AxisLink,
    positions: Sequence[int],
    issued: Sequence[Collective],
) -> SplitRow:
    chosen = [op.strategies[number] for op, number in zip(problem.ops, solution.strategies, strict=True)]
    op, strategy = problem.ops[positions[0]], chosen[positions[0]]
    inputs, params = [], []
    for slot, state in enumerate(strategy.inputs):
        producers = [problem.ops[position].inputs[slot] for position in positions]
        outputs = "/".join(dict.fromkeys(str(chosen[producer].output) for producer in producers))
        converted = str(state) if outputs == str(state) else f"{outputs}->{state}"
        if names := [problem.ops[producer].param for producer in producers if problem.ops[producer].param]:
            params.append(f"{layer_pattern(names)} {converted}")
        else:
            inputs.append(converted)
    costs = [
        step_cost(
            problem.ops[position],
            strategy,
            link,
            problem.microbatches,
            problem.layer_numbers[position] in solution.recomputed_layers,
        )
        for position in positions
    ]
    counts: Counter[Collective] = Counter()
    seconds = 0.0
    for item in issued:
        counts[replace(item, count=1, purpose=_purpose(item))] += item.count
        latency = 0.0 if item.purpose == "partial gradients" else link.latency
        seconds += item.count * (latency + wire_bytes(item.op, item.bytes, link.size) / link.bandwidth)
    return SplitRow(
        name=layer_pattern([problem.ops[position].name for position in positions]),
        op=op.op,
        layers=len(positions),
        inputs=tuple(inputs),
        params=tuple(params),
        output=str(strategy.output),
        share=strategy.compute_share,
        seconds=sum(cost.total for cost in costs),
        collectives=tuple(replace(item, count=count) for item, count in counts.items()),
        collective_seconds=seconds,
    )


def _purpose(item: Collective) -> str:
    return "activations" if item.purpose in ("forward", "backward") else item.purpose


def _cells(row: SplitRow) -> tuple[str, ...]:
    collectives = [f"{item.count} x {item.op.replace('_', '-')} {_size(item.bytes)}" for item in row.collectives]
    more = f" ({_ms(row.collective_seconds)} ms)" if collectives else ""
    return (
        row.name,
        row.op,
        str(row.layers),
        ", ".join(row.inputs),
        ", ".join(row.params),
        row.output,
        f"{row.share:.3g}",
        _ms(row.seconds),
        ", ".join(collectives) + more,
    )


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    if 0 < milliseconds < 0.01:
        return f"{milliseconds:.1g}"
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.2f}"


def _size(count: float) -> str:
    return f"{count / MIB:,.0f} MiB" if count >= 10 * MIB else f"{count / KIB:,.0f} KiB"
