"""`echelon bench`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.trouble import answer, told
from echelon.layout.faults import Fault, FaultError

if TYPE_CHECKING:
    from echelon.plan.bench import Row
    from echelon.plan.cluster import Cluster

EXAMPLES = """[bold]Examples[/bold]\n
echelon bench\n
echelon bench --out mine.toml\n
echelon plan llama-8b --cluster mine.toml
"""


def command(
    out: Annotated[Path | None, typer.Option(help="Write a cluster file (.toml) that `echelon plan` reads.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, smaller messages: seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Measure what this machine's devices reach: products, attention, memory, links."""
    with told(as_json):
        if out is not None:
            _check(out)
        from echelon.plan.bench import curves_of, described
        from echelon.plan.cluster import here

        plain = here()
        rows = _measure(plain, quick)
        found = described(plain, curves_of(rows))
        if out is not None:
            _write(out, found)
    if as_json:
        answer({"rows": [{**asdict(row), "unit": row.unit} for row in rows], "curves": asdict(curves_of(rows))})
    else:
        _show(rows, found, out)


def _check(out: Path) -> None:
    """Refuses a file that could not be written, or would not be read, before minutes are spent."""
    folder, rule = out.parent, ""
    if out.suffix != ".toml":
        rule = "does not end in .toml, by which `echelon plan --cluster` knows a file"
    elif out.is_dir():
        rule = "is a folder"
    elif not folder.is_dir():
        rule = f"lies in a folder that does not exist ({folder})"
    elif not os.access(out if out.exists() else folder, os.W_OK):
        rule = "cannot be written"
    if rule:
        raise FaultError([Fault(key="out", value=str(out), rule=rule, legal="a file such as mine.toml")])


def _write(out: Path, cluster: Cluster) -> None:
    from echelon.plan.cluster_file import to_toml

    try:
        out.write_text(to_toml(replace(cluster, name=out.stem)), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the cluster file cannot be written ({out}: {error.strerror}); give another --out") from error


def _measure(cluster: Cluster, quick: bool) -> list[Row]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from echelon.launch.pool import Pool
    from echelon.plan.bench import steps

    rows: list[Row] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with ExitStack() as stack:
        pool = stack.enter_context(Pool())
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        todo = steps(cluster, quick=quick, on_ranks=pool.run)
        task = bar.add_task("", total=len(todo))
        for step in todo:
            bar.update(task, description=step.name)
            rows += step.run()
            bar.advance(task)
    return rows


def _show(rows: Sequence[Row], cluster: Cluster, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from echelon.plan.bench import shown

    console, device = Console(), cluster.device
    most = {"matmul": device.peak("bf16"), "attention": device.peak("bf16"), "memory": device.bandwidth}
    most |= {"host": device.host.bandwidth}
    table = Table("", "size", "time", "rate", "of the most", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    last = ""
    for row in rows:
        name = row.what.replace("_", "-") if row.what != last else ""
        last = row.what
        share = row.rate / most.get(row.what, cluster.inside.bandwidth)
        size = shown(row.size) + (f" {row.note}" if row.note else "")
        table.add_row(f"[cyan]{name}[/cyan]", size, _time(row.seconds), _rate(row), f"{share:.0%}")
    stated = f"{device.peak('bf16') / 1e12:.3g} TFLOP/s, {device.bandwidth / 1e9:.4g} GB/s of memory"
    console.print(f"[bold]{cluster.devices} x {device.name}[/bold]: {stated} each\n")
    console.print(table)
    for line in _learned(cluster):
        console.print(line, soft_wrap=True)
    use = f"wrote {out}: echelon plan MODEL --cluster {out}" if out else "to plan with it, give --out mine.toml"
    console.print(f"\n{use}", soft_wrap=True)


def _learned(cluster: Cluster) -> list[str]:
    """What plans will use in the place of what was fitted to published runs."""
    from echelon.plan.calibrate import calibrated
    from echelon.plan.constants import FITTED
    from echelon.plan.links import measured_link

    found = calibrated(cluster)
    names = {
        cluster.device.generation: "share of the peak that large products reach",
        "edge": "elements that partly filled tiles add to each side of a product",
        "best_attention": "share of the peak that attention reaches",
        "streaming": "share of the memory's bandwidth that operators reach",
    }
    changed = {name: (getattr(FITTED, name), getattr(found, name)) for name in names}
    lines = [f"  {names[name]}: {new:.3g} (was {old:.3g})" for name, (old, new) in changed.items() if old != new]
    if cluster.curves and (link := measured_link(cluster.curves, cluster.per_node)):
        lines.append(f"  between devices: {link.bandwidth / 1e9:.3g} GB/s after {_time(link.latency)}")
    return ["", "Plans for this machine use", *lines]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _rate(row: Row) -> str:
    giga, unit = row.rate / 1e9, row.unit
    return f"{giga / 1e3:.3g} T{unit}" if giga >= 1e3 else f"{giga:.3g} G{unit}"
