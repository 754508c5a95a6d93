"""What short types cost: the evaluation loss that 16-bit runs end at, beside float32's, on the demo's text.

    python bench/half.py --device cuda             every kind, 400 steps, 3 seeds
    python bench/half.py --device cpu --steps 100  float32 and float16: not every CPU multiplies in bfloat16
    python bench/half.py --only float16 --json     one JSON object on stdout

Every run is `echelon train` with the demo's configuration; kinds differ in their types alone, and runs of one seed have
the same first weights and batches. Noise is the standard deviation of float32's loss over seeds. Exits with 1 where the
mean difference to float32 over seeds is larger than that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from demo import trained
from rich.console import Console
from rich.progress import track
from rich.table import Table

TRUTH = "float32"
KINDS = {
    TRUTH: {},
    "float16": {"dtype": "float16"},
    "float16, norms in float32": {"dtype": "float16", "precision.keep_fp32": '["*norm*"]'},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, no master": {"dtype": "bfloat16", "precision.master": "none"},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    kind: str
    losses: list[float]
    """of every seed"""
    skipped: list[int]
    """steps of every seed that were left out"""
    scales: list[float]
    """the last loss scale of every seed"""
    difference: float
    """to float32, the mean over seeds"""
    noise: float
    """standard deviation of float32's losses"""

    @property
    def passed(self) -> bool:
        return self.difference <= self.noise


def measure(kind: str, seed: int, steps: int, device: str) -> tuple[float, int, float]:
    """(evaluation loss, steps left out, last loss scale) of a run."""
    loss, records = trained({"device": device, **KINDS[kind]}, steps=steps, seed=seed)
    return loss, sum(record["skipped"] for record in records), float(records[-1].get("loss_scale", 1.0))


def rows_of(kinds: list[str], given: argparse.Namespace, console: Console) -> list[Row]:
    seeds = given.seeds
    plan = [(kind, seed) for kind in kinds for seed in range(seeds)]
    with ThreadPoolExecutor(given.jobs) as jobs:
        running = jobs.map(lambda each: measure(*each, given.steps, given.device), plan)
        shown = track(running, "training", total=len(plan), console=console, transient=True)
        found = dict(zip(plan, shown, strict=True))
    truths = [found[TRUTH, seed][0] for seed in range(seeds)]
    noise = statistics.stdev(truths) if seeds > 1 else 0.0
    rows = []
    for kind in kinds:
        losses, skipped, scales = zip(*(found[kind, seed] for seed in range(seeds)), strict=True)
        difference = statistics.mean(losses) - statistics.mean(truths)
        rows.append(
            Row(
                kind=kind,
                losses=list(losses),
                skipped=list(skipped),
                scales=list(scales),
                difference=difference,
                noise=noise,
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time: one leaves most of a GPU idle")
    parser.add_argument("--only", choices=KINDS, help="this kind beside float32")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    console = Console(stderr=given.json)
    every = [kind for kind in KINDS if given.device == "cuda" or not kind.startswith("bfloat16")]
    kinds = [TRUTH, given.only] if given.only and given.only != TRUTH else every
    rows = rows_of(kinds, given, console)
    if given.json:
        found = [{**asdict(row), "passed": row.passed} for row in rows]
        print(json.dumps({"steps": given.steps, "device": given.device, "rows": found}))
    else:
        table = Table("types", "loss of every seed", "difference", "noise", "left out", "last scale")
        for row in rows:
            table.add_row(
                row.kind,
                ", ".join(f"{loss:.4f}" for loss in row.losses),
                f"{row.difference:+.4f}",
                f"{row.noise:.4f}",
                ", ".join(map(str, row.skipped)),
                ", ".join(f"{scale:g}" for scale in row.scales),
            )
        console.print(table)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
