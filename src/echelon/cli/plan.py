"""`echelon plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli import cli_errors
from echelon.cli.cli_errors import report_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echelon.planning.explain.failure_cost import PredictedGoodput
    from echelon.planning.planner import PlanResult
    from echelon.planning.priced_plan import Plan
    from echelon.planning.search.memory_savings import MemorySaving

EXAMPLES = """[bold]Examples[/bold]\n
echelon plan llama-8b --cluster 8xh100\n
echelon plan llama-70b --cluster 64xh100 --batch 512 --seq-len 8192 --html plan.html\n
echelon plan llama-70b --cluster 64xh100 --layout tp=8,pp=4,schedule=zb-v,accumulate=32\n
echelon plan mixtral-8x7b --cluster 64xh100 --fix ep=8 --imbalance 1.5\n
echelon plan llama-405b --cluster 16384xh100 --batch 2048 --seq-len 8192 --goodput\n
echelon plan config.json --cluster 12xa100-80:eth --objective cost --json
"""


def command(
    model: Annotated[
        str, typer.Argument(help="A named size, a Hugging Face config.json, or file.py:factory of your own.")
    ],
    cluster: Annotated[
        str, typer.Option(help="Devices: 8xh100, 64xa100-80:eth, 8xh100+8xa100-80, a TOML file, or here.")
    ] = "here",
    batch: Annotated[
        int, typer.Option(help="Sequences of a step. Default: 16 for each device.", show_default=False)
    ] = 0,
    seq_len: Annotated[
        int, typer.Option(help="Tokens of a sequence. Default: the model's, at most 4096.", show_default=False)
    ] = 0,
    layout: Annotated[str, typer.Option(help="Price this layout instead of searching.")] = "",
    fix: Annotated[str, typer.Option(help="Keys of the layout that stay as they are: tp=8,schedule=zb-v.")] = "",
    precision: Annotated[str, typer.Option(help="Of the products: bf16, fp16, fp8, fp4 or fp32.")] = "bf16",
    objective: Annotated[str, typer.Option(help="What counts: time, cost, energy, or devices (the fewest).")] = "time",
    plan_only: Annotated[bool, typer.Option(help="Rank layouts too that cannot be run yet.")] = False,
    tokens: Annotated[
        float, typer.Option(help="Say how long so many tokens take, in days and dollars: 1e12.", show_default=False)
    ] = 0.0,
    imbalance: Annotated[
        float,
        typer.Option(
            help="Rows of experts on the busiest of the ranks that divide them, to the mean. Default: 1.3.",
            show_default=False,
        ),
    ] = 0.0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As of train: optimizer.*, clip, compress or memory.*."),
    ] = None,
    savings: Annotated[
        bool, typer.Option("--savings", help="Say what each technique would save of the memory, and cost.")
    ] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Say what failures would cost a long run, and how often to save.")
    ] = False,
    device_hours: Annotated[
        float,
        typer.Option(help="Hours of one device between failures. Default: Llama 3's, 50,700.", show_default=False),
    ] = 0.0,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    correct: Annotated[
        str, typer.Option(metavar="RUN", help="Multiply times by what this run measured over what was predicted.")
    ] = "",
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Rank layouts of a model on a cluster, with predicted time and memory, or price one. Needs no device."""
    with report_errors(as_json):
        from echelon.planning import planner
        from echelon.planning.search.memory_savings import memory_savings as savings_of
        from echelon.training.run.auto_layout import parse_plan_settings, settings_with_effect

        given = settings or []
        said = parse_plan_settings(given, layout)
        found = planner.find_plans(
            model,
            cluster,
            batch=batch,
            seq_len=seq_len,
            layout=layout,
            fixed=fix,
            precision=precision,
            objective=objective,
            plan_only=plan_only,
            top=top,
            correct=correct,
            tokens=tokens,
            imbalance=imbalance,
            rule=said.rule,
            thrift=said.memory_options,
            host=said.host,
        )
        least = found.plans[0] if found.plans else found.nearest
        given = settings_with_effect(given, str(least.layout)) if least is not None else given
        # Where nothing fits, what would make room is the question.
        told_savings = savings_of(least) if least is not None and (savings or not least.fits) else ()
        told_goodput = _estimate_goodput(found, device_hours) if goodput or device_hours else None
        if html is not None and found.plans:
            _write_html(html, found, model, given)
    if as_json:
        told_json = {"plans": [plan.to_json() for plan in found.plans], "reasons": list(found.explanation)}
        if told_savings:
            told_json["savings"] = [one.to_json() for one in told_savings]
        if told_goodput is not None:
            told_json["goodput"] = told_goodput.to_json()
        cli_errors.print_json(told_json)
    else:
        _show(found, model, html, given)
        if least is not None and told_savings:
            _show_savings(least, told_savings)
        if told_goodput is not None:
            _show_goodput(found.plans[0], told_goodput)
    if not found.plans or not found.plans[0].fits:
        raise typer.Exit(cli_errors.EXIT_FAILED)


def _write_html(path: Path, found: PlanResult, model: str, given: Sequence[str]) -> None:
    from echelon.planning.planner import train_command
    from echelon.planning.show.plan_html import plans_html

    text = plans_html(
        found.plans,
        title=f"{model} on {found.plans[0].scenario.cluster.name}",
        command=train_command(found.plans[0], model, given),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the page cannot be written ({path}: {error.strerror}); give another --html") from error


def _estimate_goodput(found: PlanResult, device_hours: float) -> PredictedGoodput | None:
    from echelon.planning.explain.failure_cost import DEVICE_HOURS, predict_goodput

    if device_hours < 0:
        raise ValueError(f"no time between failures is less than none (--device-hours {device_hours:g})")
    return predict_goodput(found.plans[0], device_hours=device_hours or DEVICE_HOURS) if found.plans else None


def _show_goodput(plan: Plan, found: PredictedGoodput) -> None:
    from rich.console import Console

    from echelon.planning.show.goodput_text import goodput_report

    Console().print(goodput_report(plan, found))


def _show_savings(plan: Plan, found: Sequence[MemorySaving]) -> None:
    from rich.console import Console

    from echelon.planning.show.savings_table import savings_report

    Console().print(savings_report(plan, found))


def _show(found: PlanResult, model: str, html: Path | None, given: Sequence[str]) -> None:
    from rich.console import Console

    from echelon.planning.planner import train_command
    from echelon.planning.show.plan_text import plans_text

    console = Console()
    command = train_command(found.plans[0], model, given) if found.plans else ""
    console.print(plans_text(found.plans, width=console.width, command=command, explanation=found.explanation))
    if html is not None and found.plans:
        console.print(f"wrote {html}")
