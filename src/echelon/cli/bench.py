"""`echelon bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.cli_errors import EXIT_FAILED, print_json, report_errors
from echelon.cli.cli_options import AsJson, optional, write_text

if TYPE_CHECKING:
    from echelon.bench.bench_device import BenchDevice
    from echelon.bench.bench_request import BenchOptions, BenchPlan
    from echelon.bench.bench_rows import BenchRow as StepRow
    from echelon.bench.profile.breakdown import Breakdown
    from echelon.planning.cluster.cluster import Cluster
    from echelon.planning.cluster.device_bench import DeviceMeasurement as DeviceRow
    from echelon.training.logging.metrics import PeakFlops

EXAMPLES = """[bold]Examples[/bold]\n
echelon bench\n
echelon bench --only steps --shapes 1b,3b --precision bf16,fp8\n
echelon bench --only devices --out mine.toml\n
echelon bench --profile step.svg --shapes 1b\n
echelon plan llama-8b --cluster mine.toml
"""

Announce = Callable[[str], None]
"""shows the name of the next measurement, and counts the previous one as done"""


def command(
    only: Annotated[str, optional("Measure one of the two. Default: both.", metavar="devices|steps")] = "",
    out: Annotated[Path | None, typer.Option(help="Write a cluster file (.toml) that `echelon plan` reads.")] = None,
    cluster: Annotated[
        str, optional("Cluster file that describes this machine's devices, if they are no known kind.", metavar="FILE")
    ] = "",
    shapes: Annotated[
        str,
        optional("Shapes: tiny, gpt2, gpt2-x8, gpt2-350m, gpt2-1.5b, 1b, 3b, 8b. Default: what fits."),
    ] = "",
    precision: Annotated[
        str, optional("GEMM precisions: fp32, bf16, fp8, fp8-row. Default: those the device supports.")
    ] = "",
    peers: Annotated[
        str, typer.Option(metavar="DIR", help="Unpacked wheels of peers. Default: .peers, if it exists.")
    ] = "",
    against: Annotated[str, optional("Peers to run: compiled, torchtitan, transformers, or none. Default: all.")] = "",
    steps: Annotated[int | None, optional("Timed steps. Default: 8.")] = None,
    states: Annotated[
        str, optional("Dtype of our AdamW's moments. Default: float32.", metavar="float32|bfloat16")
    ] = "",
    recompute: Annotated[
        str,
        optional("Recomputation. Default: what the shape needs to fit.", metavar="none|ops|selective|full|sqrt"),
    ] = "",
    batch: Annotated[int | None, optional("Sequences per step. Default: the shape's.")] = None,
    seq_len: Annotated[int | None, optional("Tokens per sequence. Default: the shape's.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile our step instead (CUDA); writes FILE as .json and as .svg."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats and smaller collectives: takes seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's devices, and training steps against those of other frameworks."""
    with report_errors(as_json):
        from echelon.bench import bench_request

        options = bench_request.BenchOptions(
            only=only,
            out=out,
            cluster=cluster,
            profile=profile,
            shapes=shapes,
            precision=precision,
            peers=peers,
            against=against,
            steps=steps,
            states=states,
            recompute=recompute,
            batch=batch,
            seq_len=seq_len,
        )
        bench_request.check_options(options)
        from echelon.bench import bench_device

        device = bench_device.detect_device()
        if profile is not None:
            ran = _profile(options, device, profile, as_json)
        else:
            ran = _measure(options, device, quick, as_json)
    if not ran:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _progress_bar(total: int) -> Iterator[Announce]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def announce(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1
            if not console.is_terminal:  # a log file shows no bar
                console.print(f"{begun} of {total}: {name}", highlight=False, soft_wrap=True)

        yield announce


# -- steps and devices ------------------------------------------------------------------------------------------------


def _measure(options: BenchOptions, device: BenchDevice, quick: bool, as_json: bool) -> bool:
    """Measure and print; true if any of our steps ran."""
    from echelon.bench import bench_request

    todo = bench_request.BenchPlan(measurements=(), left_out={})
    if options.with_steps:
        todo = bench_request.plan_measurements(options, device, quick=quick)
    plain = _described_cluster(options.cluster) if options.with_devices else None
    # Steps come first: the device measurements would leave less memory for them.
    rows, peak = _measure_steps(todo, device)
    devices, cluster = _measure_devices(plain, quick) if plain is not None else ([], None)
    if options.out is not None and cluster is not None:
        from echelon.planning.cluster.cluster_file import cluster_to_toml

        write_text(options.out, cluster_to_toml(replace(cluster, name=options.out.stem)), "cluster file", "--out")
    if as_json:
        curves = asdict(cluster.curves) if cluster is not None and cluster.curves else None
        step_rows, device_rows = [row.to_json() for row in rows], [{**asdict(row), "unit": row.unit} for row in devices]
        print_json({"rows": step_rows, "left_out": todo.left_out, "devices": device_rows, "curves": curves})
    else:
        _show(rows, todo, peak, devices, cluster, options.out)
    return not rows or any(row.is_ours and row.failed is None for row in rows)


def _measure_steps(todo: BenchPlan, device: BenchDevice) -> tuple[list[StepRow], PeakFlops | None]:
    from echelon.bench.bench_rows import add_peer_ratios, make_row
    from echelon.bench.subprocess_bench import run_in_subprocess
    from echelon.training.logging.metrics import peak_flops

    if not todo.measurements:
        return [], None
    with _progress_bar(len(todo.measurements)) as announce:
        results = []
        for measurement in todo.measurements:
            announce(str(measurement))
            results.append(run_in_subprocess("echelon.bench.measure_step", measurement))
    import torch

    peak = peak_flops(torch.device(device.device_type))
    rows = [make_row(each, result, peak.flops) for each, result in zip(todo.measurements, results, strict=True)]
    return add_peer_ratios(rows), peak


def _described_cluster(path: str) -> Cluster:
    from echelon.planning.cluster.cluster import local_cluster
    from echelon.planning.cluster.device_bench import read_description

    return read_description(path) if path else local_cluster()


def _measure_devices(plain: Cluster, quick: bool) -> tuple[list[DeviceRow], Cluster]:
    from echelon.launch.rank_pool import RankPool
    from echelon.planning.cluster.device_bench import bench_steps, to_curves, with_curves

    rows: list[DeviceRow] = []
    with ExitStack() as stack:
        pool = stack.enter_context(RankPool())
        todo = bench_steps(plain, quick=quick, on_ranks=pool.run)
        announce = stack.enter_context(_progress_bar(len(todo)))
        for step in todo:
            announce(step.name)
            rows += step.run()
    return rows, with_curves(plain, to_curves(rows))


def _show(
    rows: Sequence[StepRow],
    todo: BenchPlan,
    peak: PeakFlops | None,
    devices: Sequence[DeviceRow],
    cluster: Cluster | None,
    out: Path | None,
) -> None:
    from rich.console import Console

    from echelon.bench.tables import device_table, step_table

    console = Console()
    if peak is not None:
        console.print(step_table.step_table(rows, width=console.width))
        console.print()
        for line in step_table.remarks(rows, todo.left_out, peak):
            console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)
    if cluster is not None:
        if rows:
            console.print()
        console.print(device_table.heading(cluster))
        console.print(device_table.device_table(devices, cluster))
        for line in device_table.calibration_lines(cluster):
            console.print(line, soft_wrap=True)
        use = "to plan with these, write them with --out mine.toml"
        if out:
            use = f"wrote {out}: echelon plan MODEL --cluster {out}"
        console.print(f"\n{use}", soft_wrap=True)


# -- profile of a step ------------------------------------------------------------------------------------------------


def _profile(options: BenchOptions, device: BenchDevice, path: Path, as_json: bool) -> bool:
    """Profile our steps, write both files and print the breakdown; true if any step ran."""
    from echelon.bench import bench_request, subprocess_bench
    from echelon.bench.profile import breakdown, breakdown_svg

    measurements = bench_request.plan_profiles(options, device)
    breakdowns: list[Breakdown] = []
    failed: dict[str, str] = {}
    with _progress_bar(len(measurements)) as announce:
        for measurement in measurements:
            announce(str(measurement))
            result = subprocess_bench.run_in_subprocess("echelon.bench.profile.step_profile", measurement)
            if "failed" in result:
                failed[str(measurement)] = result["failed"]
            else:
                breakdowns.append(breakdown.from_dict(result))
    if breakdowns:
        text = json.dumps(breakdown.to_json(breakdowns), indent=1) + "\n"
        write_text(path.with_suffix(".json"), text, "profile", "file")
        write_text(path.with_suffix(".svg"), breakdown_svg.as_svg(breakdowns), "profile", "file")
    if as_json:
        print_json({**breakdown.to_json(breakdowns), "failed": failed})
    else:
        _show_profile(breakdowns, failed, path)
    return bool(breakdowns)


def _show_profile(breakdowns: Sequence[Breakdown], failed: dict[str, str], path: Path) -> None:
    from rich.console import Console

    from echelon.bench.tables import breakdown_table

    console = Console()
    for breakdown in breakdowns:
        console.print(breakdown_table.heading(breakdown), highlight=False)
        console.print(breakdown_table.breakdown_table(breakdown))
        for line in breakdown_table.remarks(breakdown):
            console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)
        console.print()
    for name, why in failed.items():
        console.print(f"{name}: {why}", style="red", soft_wrap=True, markup=False, highlight=False)
    if breakdowns:
        console.print(f"wrote {path.with_suffix('.json')} and {path.with_suffix('.svg')}", soft_wrap=True)
