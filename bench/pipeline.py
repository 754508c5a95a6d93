"""What a step of our pipeline runtime costs beside torch's own pipelining schedules, pp=2 on gloo, a thread per rank.

    python bench/pipeline.py                       GPipe, 1F1B, interleaved, ZB-V; 30 pairs each
    python bench/pipeline.py --only zb-v --pairs 10 --microbatches 4
    python bench/pipeline.py --padded              step time with sleeping stages beside the simulated time, pp=4
    python bench/pipeline.py --json                one JSON object on stdout

A step is forward and backward over all microbatches, without an update on either side (torch_pipeline.py). Losses must
agree in every pair, gradients once. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial

import padded
from model import CONFIG
from pairs import LOSS_TOLERANCE, WARM_UP, Summary, measure, summary
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch_pipeline import PEERS, sides

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout

RATIO_BAR = 1.05
"""the largest ratio allowed, ours over torch's"""
PADDED_BAR = 0.05
"""how far a measured step may be from the simulated one"""
UNIT = 0.1
"""seconds that a padded rank sleeps in F, in I and in W of a microbatch"""
PAIRS, MICROBATCHES, STEPS = 30, 8, 3
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    peer: str
    microbatches: int
    summary: Summary

    @property
    def same_loss(self) -> bool:
        return self.summary.loss_difference <= LOSS_TOLERANCE

    @property
    def passed(self) -> bool:
        return self.same_loss and self.summary.ratio <= RATIO_BAR

    def as_json(self) -> dict[str, object]:
        named = {"name": self.name, "peer": self.peer, "microbatches": self.microbatches}
        return {**named, "bar": RATIO_BAR, "passed": self.passed, **asdict(self.summary)}


@dataclass(frozen=True, kw_only=True)
class Padded:
    name: str
    simulated_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.simulated_s

    @property
    def passed(self) -> bool:
        return abs(self.ratio - 1) <= PADDED_BAR

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio, "bar": PADDED_BAR, "passed": self.passed}


def against_torch(names: list[str], microbatches: int, pairs: int, console: Console) -> list[Row]:
    rows = []
    with Progress(*COLUMNS, console=console) as progress:
        for name in names:
            task = progress.add_task(f"{name} / {PEERS[name].__name__}", total=pairs + WARM_UP)
            layout = Layout.parse(f"pp=2,schedule={name},microbatch=1,accumulate={microbatches}")
            found = summary(measure(layout, sides, pairs, partial(progress.advance, task)))
            rows.append(Row(name=name, peer=PEERS[name].__name__, microbatches=microbatches, summary=found))
    return rows


def against_simulation(names: list[str], steps: int, console: Console) -> list[Padded]:
    rows = []
    with Progress(*COLUMNS, console=console) as progress, RankPool() as pool:
        for name in progress.track(names, description="padded"):
            # What disturbs a step makes it longer, never shorter: the shortest is the truest.
            found = min(pool.run(padded.measured, padded.RANKS, name, UNIT, steps, timeout=600.0)[0])
            rows.append(Padded(name=name, simulated_s=padded.simulated(name, UNIT), measured_s=found))
    return rows


def table(rows: list[Row]) -> Table:
    title = (
        f"step time, ours / torch: pp=2, {rows[0].microbatches} microbatches, {CONFIG.parameters / 1e6:.1f}M parameters"
    )
    found = _table(title, ("name", "peer"), ("ms", "ms", "ratio", "quartiles", "bar"))
    for row in rows:
        s = row.summary
        verdict = _verdict(row.passed) if row.same_loss else "[red]LOSS DIFFERS"
        times = f"{1e3 * s.ours_s:.0f}", f"{1e3 * s.peer_s:.0f}", f"{s.ratio:.3f}", f"{s.low:.2f}-{s.high:.2f}"
        found.add_row(row.name, row.peer, *times, f"{RATIO_BAR:.2f}", verdict)
    return found


def padded_table(rows: list[Padded]) -> Table:
    title = f"step time with sleeping stages: pp={padded.RANKS}, {padded.MICROBATCHES} microbatches"
    found = _table(title, ("schedule",), ("simulated ms", "measured ms", "ratio"))
    for row in rows:
        times = f"{1e3 * row.simulated_s:.0f}", f"{1e3 * row.measured_s:.0f}", f"{row.ratio:.3f}"
        found.add_row(row.name, *times, _verdict(row.passed))
    return found


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    found = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in words:
        found.add_column(heading, no_wrap=True)
    for heading in numbers:
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    return found


def _verdict(passed: bool) -> str:
    return "[green]PASS" if passed else "[red]MISS"


def main() -> int:
    names = list(dict.fromkeys([*PEERS, *padded.SCHEDULES]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help=f"pairs of steps per schedule (default {PAIRS})")
    parser.add_argument("--microbatches", type=int, help=f"per step, of one sequence (default {MICROBATCHES})")
    parser.add_argument("--padded", action="store_true", help="sleeping stages against the simulation")
    parser.add_argument("--steps", type=int, help=f"padded steps, the shortest counts (default {STEPS})")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args()
    for name in ("pairs", "microbatches", "steps"):
        given = getattr(options, name)
        if given is not None and given < 1:
            parser.error(f"there must be something to measure (--{name} {given}); use 1 or more")
        if given is not None and options.padded != (name == "steps"):
            remedy = "leave --padded out" if options.padded else "use --padded"
            parser.error(f"it would have no effect (--{name} {given}); leave it out, or {remedy}")
    every = padded.SCHEDULES if options.padded else tuple(PEERS)
    if unknown := [name for name in options.only or () if name not in every]:
        parser.error(f"torch has no {unknown[0]} to compare with (--only {unknown[0]}); use --padded")

    chosen = [name for name in every if not options.only or name in options.only]
    # The progress goes to stderr, so that stdout holds the table, or the object of --json, alone.
    console = Console(stderr=True)
    rows: list[Row] | list[Padded]
    if options.padded:
        rows = against_simulation(chosen, options.steps or STEPS, console)
        shown = padded_table(rows)
    else:
        rows = against_torch(chosen, options.microbatches or MICROBATCHES, options.pairs or PAIRS, console)
        shown = table(rows)
    passed = all(row.passed for row in rows)
    if options.json:
        print(json.dumps({"passed": passed, "rows": [row.as_json() for row in rows]}))
    else:
        Console().print(shown)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
