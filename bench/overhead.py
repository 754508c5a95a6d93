"""What Echelon's step costs beside hand-written code for the same thing, on CPU with gloo, one thread per rank.

    python bench/overhead.py                       all comparisons, 30 pairs each
    python bench/overhead.py --only ddp --pairs 10
    python bench/overhead.py --json                one JSON object on stdout

Both sides train the same model of 10 million parameters from the same weights on the same batches, without clipping,
and read the loss as a number after each step. The losses must agree in every step. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import dtensor
import hand_tensor
import peers
from model import CONFIG
from pairs import LOSS_TOLERANCE, WARM_UP, Summary, layout_of, measure, summary, whole_steps
from peers import Step
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Comparison:
    name: str
    layout: str
    against: str
    """the peer, in words"""
    peer: Callable[[], Step]
    bar: float
    """the largest ratio allowed, ours over the peer's"""


COMPARISONS = (
    Comparison(name="plain", layout="dp=1", against="plain loop", peer=peers.plain, bar=1.05),
    Comparison(name="ddp", layout="dp=2", against="DDP", peer=peers.ddp, bar=1.05),
    Comparison(name="fully_shard", layout="dp=2,zero=3", against="fully_shard", peer=peers.fully_shard, bar=1.05),
    Comparison(
        name="hand", layout="tp=2,sp=0", against="hand, all-reduce", peer=hand_tensor.all_reduce_layers, bar=1.05
    ),
    Comparison(
        name="hand-sp",
        layout="tp=2",
        against="hand, sequence",
        peer=hand_tensor.sequence_layers,
        bar=1.05,
    ),
    Comparison(name="dtensor", layout="tp=2,sp=0", against="DTensor", peer=dtensor.whole, bar=0.8),
    Comparison(
        name="dtensor-sp",
        layout="tp=2",
        against="DTensor, sequence",
        peer=dtensor.sequence,
        bar=0.8,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    comparison: Comparison
    summary: Summary

    @property
    def same_loss(self) -> bool:
        return self.summary.loss_difference <= LOSS_TOLERANCE

    @property
    def passed(self) -> bool:
        return self.same_loss and self.summary.ratio <= self.comparison.bar

    def as_json(self) -> dict[str, object]:
        c = self.comparison
        named = {"name": c.name, "layout": c.layout, "peer": c.against, "bar": c.bar, "passed": self.passed}
        return {**named, **asdict(self.summary)}


def run(chosen: list[Comparison], pairs: int, console: Console) -> list[Row]:
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for comparison in chosen:
            task = progress.add_task(f"{comparison.layout} / {comparison.against}", total=pairs + WARM_UP)
            tick = partial(progress.advance, task)
            sides = partial(whole_steps, comparison.peer)
            found = measure(layout_of(comparison.layout), sides, pairs, tick)
            rows.append(Row(comparison=comparison, summary=summary(found)))
    return rows


def table(rows: list[Row]) -> Table:
    title = f"step time, ours / peer: {CONFIG.parameters / 1e6:.1f}M parameters, one thread per rank"
    found = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "ours", "peer"):
        found.add_column(heading, no_wrap=True)
    for heading in ("ms", "ms", "ratio", "quartiles", "bar"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for row in rows:
        c, s = row.comparison, row.summary
        verdict = "[green]PASS" if row.passed else "[red]MISS" if row.same_loss else "[red]LOSS DIFFERS"
        found.add_row(
            c.name,
            c.layout,
            c.against,
            f"{1e3 * s.ours_s:.0f}",
            f"{1e3 * s.peer_s:.0f}",
            f"{s.ratio:.3f}",
            f"{s.low:.2f}-{s.high:.2f}",
            f"{c.bar:.2f}",
            verdict,
        )
    return found


def main() -> int:
    names = [comparison.name for comparison in COMPARISONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps per comparison (default 30)")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"there must be a pair to measure (--pairs {options.pairs}); use 1 or more")

    chosen = [comparison for comparison in COMPARISONS if not options.only or comparison.name in options.only]
    # With --json the progress goes to stderr, so that stdout holds the object alone.
    rows = run(chosen, options.pairs, Console(stderr=True))
    passed = all(row.passed for row in rows)
    if options.json:
        model = {"parameters": CONFIG.parameters, "seq_len": CONFIG.max_seq_len}
        print(json.dumps({"passed": passed, "model": model, "rows": [row.as_json() for row in rows]}))
    else:
        Console().print(table(rows))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
