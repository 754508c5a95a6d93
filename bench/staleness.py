"""What old weights cost: the evaluation loss that asynchronous schedules end at, beside 1F1B's, on the demo's text.

    python bench/staleness.py                      4 stages, 300 steps, 3 seeds: about ten minutes on two cores
    python bench/staleness.py --only 2bw --seeds 1
    python bench/staleness.py --json               one JSON object on stdout

Every run is `echelon train` with the demo's configuration, and the schedules differ in nothing but their name: untied
weights and the learning rate are the same for 1F1B. A step of PipeDream makes an update for each of its microbatches,
one of 1F1B and of 2BW makes one. Exits with 1 when a bar is missed.

[Note: the learning rate]

A gradient that is late by a step makes AdamW oscillate at a learning rate that is far below the one at which it would
without the delay, so the demo's own rate (3e-3) is too high for old weights: there 2BW ends 0.7 nats behind 1F1B, and
so does a plain loop on one device whose gradients are one update late. The rate here is a tenth of it; `--lr 3e-3`
shows the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass

from demo import trained
from rich.console import Console
from rich.progress import track
from rich.table import Table

BAR = 0.05
"""nats by which the mean over seeds may be above 1F1B's"""
PEER = "1f1b"
SCHEDULES = (PEER, "pipedream", "pipedream-vsync", "2bw")
LAYOUT = "pp=4,accumulate=4"


@dataclass(frozen=True, kw_only=True)
class Row:
    schedule: str
    losses: list[float]
    """of every seed"""
    difference: float
    """of the means, to 1F1B"""

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def passed(self) -> bool:
        return self.difference <= BAR


def loss(schedule: str, seed: int, steps: int, lr: float) -> float:
    """The evaluation loss that a run ends at."""
    settings = {"layout": f"{LAYOUT},schedule={schedule}", "optimizer.lr": lr, "tied": "false"}
    return trained(settings, steps=steps, seed=seed)[0]


def measure(schedules: list[str], seeds: int, steps: int, lr: float, console: Console) -> list[Row]:
    work = [(schedule, seed) for schedule in schedules for seed in range(seeds)]
    found: dict[str, list[float]] = {schedule: [] for schedule in schedules}
    for schedule, seed in track(work, "runs", console=console):
        found[schedule].append(loss(schedule, seed, steps, lr))
    peer = statistics.mean(found[PEER])
    return [
        Row(schedule=schedule, losses=losses, difference=statistics.mean(losses) - peer)
        for schedule, losses in found.items()
    ]


def table(rows: list[Row], steps: int, lr: float) -> Table:
    found = Table(title=f"evaluation loss after {steps} steps, {LAYOUT}, lr {lr:g}", box=None, pad_edge=False)
    found.add_column("schedule", no_wrap=True)
    for heading in ("seeds", "mean", f"minus {PEER}", "bar"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("")
    for row in rows:
        seeds = " ".join(f"{loss:.3f}" for loss in row.losses)
        verdict = "[green]PASS" if row.passed else "[red]MISS"
        found.add_row(row.schedule, seeds, f"{row.mean:.3f}", f"{row.difference:+.3f}", f"{BAR:.2f}", verdict)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of every schedule (default 3)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a run (default 300)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of all of them (default 3e-4)")
    parser.add_argument("--only", action="append", choices=SCHEDULES[1:], help="one schedule beside 1f1b; repeatable")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args()
    for name in ("seeds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"there must be something to measure (--{name} {getattr(options, name)}); use 1 or more")
    chosen = [PEER, *(options.only or SCHEDULES[1:])]
    rows = measure(chosen, options.seeds, options.steps, options.lr, Console(stderr=True))
    passed = all(row.passed for row in rows)
    if options.json:
        print(json.dumps({"passed": passed, "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(table(rows, options.steps, options.lr))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
