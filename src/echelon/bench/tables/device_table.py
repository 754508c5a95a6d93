"""What devices reach, as a table for the terminal, and the planner constants that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from echelon.planning.calibrate.calibration import calibrate
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.cluster.device_bench import DeviceMeasurement, format_size
from echelon.planning.cluster.link_time import fit_link


def heading(cluster: Cluster) -> str:
    device = cluster.device
    stated = f"{device.peak('bf16') / 1e12:.3g} TFLOP/s, {device.bandwidth / 1e9:.4g} GB/s of memory"
    return f"[bold]{cluster.devices} x {device.name}[/bold]: {stated} each\n"


def device_table(rows: Sequence[DeviceMeasurement], cluster: Cluster) -> Table:
    device = cluster.device
    most = {"matmul": device.peak("bf16"), "attention": device.peak("bf16"), "memory": device.bandwidth}
    most |= {"host": device.host_link.bandwidth}
    table = Table("", "size", "time", "rate", "of the most", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    last = ""
    for row in rows:
        name = row.what.replace("_", "-") if row.what != last else ""
        last = row.what
        share = row.rate / most.get(row.what, cluster.intra_node.bandwidth)
        size = format_size(row.size) + (f" {row.note}" if row.note else "")
        table.add_row(f"[cyan]{name}[/cyan]", size, _format_time(row.seconds), _format_rate(row), f"{share:.0%}")
    return table


def calibration_lines(cluster: Cluster) -> list[str]:
    """The constants that plans for this machine use in place of those fitted to published runs."""
    constants = calibrate(cluster)
    attention = "blackwell_attention" if cluster.device.generation == "blackwell" else "best_attention"
    names = {
        cluster.device.generation: "share of the peak that large matmuls reach",
        "edge": "elements that partly filled tiles add to each side of a matmul",
        attention: "share of the peak that attention reaches",
        "memory_bandwidth": "share of the memory bandwidth that memory-bound operators reach",
    }
    changed = {name: (getattr(FITTED_CONSTANTS, name), getattr(constants, name)) for name in names}
    lines = [f"  {names[name]}: {new:.3g} (was {old:.3g})" for name, (old, new) in changed.items() if old != new]
    if cluster.curves and (link := fit_link(cluster.curves, cluster.per_node)):
        lines.append(f"  between devices: {link.bandwidth / 1e9:.3g} GB/s after {_format_time(link.latency)}")
    return ["", "Plans for this machine use", *lines]


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _format_rate(row: DeviceMeasurement) -> str:
    giga, unit = row.rate / 1e9, row.unit
    return f"{giga / 1e3:.3g} T{unit}" if giga >= 1e3 else f"{giga:.3g} G{unit}"
