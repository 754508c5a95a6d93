"""`echelon plan`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli import cli_errors
from echelon.cli.cli_errors import report_errors
from echelon.cli.cli_options import AsJson, optional, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echelon.planning.explain.failure_cost import PredictedGoodput
    from echelon.planning.planner import PlanResult

EXAMPLES = """[bold]Examples[/bold]\n
echelon plan llama-8b --cluster 8xh100\n
echelon plan llama-70b --cluster 64xh100 --batch 512 --seq-len 8192 --html plan.html\n
echelon plan llama-70b --cluster 64xh100 --layout tp=8,pp=4,schedule=zb-v,accumulate=32\n
echelon plan mixtral-8x7b --cluster 64xh100 --fix ep=8 --imbalance 1.5\n
echelon plan llama-405b --cluster 16384xh100 --batch 2048 --seq-len 8192 --goodput\n
echelon plan llama-70b --cluster 64xa100-80 --program megatron\n
echelon plan config.json --cluster 12xa100-80:eth --objective cost --json\n
echelon plan hf:my-model --cluster 8xh100 --batch 64
"""


def command(
    model: Annotated[
        str,
        typer.Argument(help="A named size, a Hugging Face config.json, hf:DIR, or file.py:factory of a custom model."),
    ],
    cluster: Annotated[
        str, typer.Option(help="Devices: 8xh100, 64xa100-80:eth, 8xh100+8xa100-80, a TOML file, or here.")
    ] = "here",
    batch: Annotated[int, optional("Sequences per step. Default: 16 per device.")] = 0,
    seq_len: Annotated[int, optional("Tokens per sequence. Default: the model's, at most 4096.")] = 0,
    layout: Annotated[str, typer.Option(help="Price this layout instead of searching.")] = "",
    fix: Annotated[str, typer.Option(help="Layout keys to fix in the search: tp=8,schedule=zb-v.")] = "",
    precision: Annotated[str, typer.Option(help="GEMM precision: bf16, fp16, fp8, fp4 or fp32.")] = "bf16",
    program: Annotated[
        str,
        typer.Option(
            help="Program to price: echelon, megatron, megatron-2021 (before flash attention), deepspeed, torch, "
            "torch-compiled, xla, or unknown."
        ),
    ] = "echelon",
    objective: Annotated[str, typer.Option(help="What to minimise: time, cost, energy or devices.")] = "time",
    plan_only: Annotated[
        bool,
        typer.Option(
            help="Also rank what train refuses (fp8 with tp grids, cp of a model whose "
            "attention cannot be divided), and cp down to 1,024 tokens per rank."
        ),
    ] = False,
    tokens: Annotated[float, optional("Estimate days and dollars for this number of tokens: 1e12.")] = 0.0,
    imbalance: Annotated[float, optional("Max/mean expert load across ep ranks. Default: 1.3.")] = 0.0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Keys as in train: optimizer.*, clip, compress, memory.* or lora.*."
        ),
    ] = None,
    savings: Annotated[
        bool, typer.Option("--savings", help="List what each memory technique would save and cost.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Price simpler ways beside it: DataParallel, DDP, a naive layer split.")
    ] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Estimate the cost of failures in a long run, and how often to save.")
    ] = False,
    device_hours: Annotated[
        float, optional("Mean hours between failures of one device. Default: Llama 3's, 50,700.")
    ] = 0.0,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    correct: Annotated[
        str, typer.Option(metavar="RUN", help="Correct times by this run's measured over predicted time.")
    ] = "",
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank layouts of a model on a cluster by predicted time and memory, or price one. Needs no device."""
    with report_errors(as_json):
        from echelon.planning import planner
        from echelon.planning.search.memory_savings import memory_savings as savings_of
        from echelon.training.run.auto_layout import parse_plan_settings, settings_with_effect

        given = settings or []
        parsed = parse_plan_settings(given, layout)
        result = planner.find_plans(
            model,
            cluster,
            batch=batch,
            seq_len=seq_len,
            layout=layout,
            fixed=fix,
            precision=precision,
            program=program,
            objective=objective,
            plan_only=plan_only,
            top=top,
            correct=correct,
            tokens=tokens,
            imbalance=imbalance,
            optimizer=parsed.rule,
            memory_options=parsed.memory_options,
            host_share=parsed.host,
            lora_rank=parsed.lora_rank,
            lora_targets=parsed.lora_targets,
            baselines=baselines,
        )
        best = result.plans[0] if result.plans else result.nearest
        given = settings_with_effect(given, str(best.layout)) if best is not None else given
        # If nothing fits, the possible memory savings are what the user needs.
        memory_savings = savings_of(best) if best is not None and (savings or not best.fits) else ()
        predicted_goodput = _estimate_goodput(result, device_hours) if goodput or device_hours else None
        if html is not None and result.plans:
            _write_html(html, result, model, given)
    if as_json:
        report = {"plans": [plan.to_json() for plan in result.plans], "reasons": list(result.explanation)}
        if baselines:
            report["baselines"] = [baseline.to_json() for baseline in result.baselines]
        if result.replicated_stages is not None:
            report["replicated_stages"] = result.replicated_stages.to_json()
        if memory_savings:
            report["savings"] = [saving.to_json() for saving in memory_savings]
        if predicted_goodput is not None:
            report["goodput"] = predicted_goodput.to_json()
        cli_errors.print_json(report)
    else:
        _show(result, model, html, given)
        from rich.console import Console

        if baselines:
            from echelon.planning.show.baselines_table import baselines_report

            Console().print(baselines_report(result.plans[0] if result.plans else None, result.baselines))
        if best is not None and memory_savings:
            from echelon.planning.show.savings_table import savings_report

            Console().print(savings_report(best, memory_savings))
        if predicted_goodput is not None:
            from echelon.planning.show.goodput_text import goodput_report

            Console().print(goodput_report(result.plans[0], predicted_goodput))
    if not result.plans or not result.plans[0].fits:
        raise typer.Exit(cli_errors.EXIT_FAILED)


def _write_html(path: Path, result: PlanResult, model: str, given: Sequence[str]) -> None:
    from echelon.planning.planner import train_command
    from echelon.planning.show.plan_html import plans_html

    best = result.plans[0]
    title, command = f"{model} on {best.scenario.cluster.name}", train_command(best, model, given)
    write_text(path, plans_html(result.plans, title=title, command=command), "page", "--html")


def _estimate_goodput(result: PlanResult, device_hours: float) -> PredictedGoodput | None:
    from echelon.planning.explain.failure_cost import DEVICE_HOURS, predict_goodput

    if not 0 <= device_hours < math.inf:
        raise ValueError(f"--device-hours must be a positive number of hours ({device_hours:g})")
    return predict_goodput(result.plans[0], device_hours=device_hours or DEVICE_HOURS) if result.plans else None


def _show(result: PlanResult, model: str, html: Path | None, given: Sequence[str]) -> None:
    from rich.console import Console

    from echelon.planning.planner import train_command
    from echelon.planning.show.plan_text import plans_text

    console = Console()
    command = train_command(result.plans[0], model, given) if result.plans else ""
    console.print(plans_text(result.plans, width=console.width, command=command, explanation=result.explanation))
    if html is not None and result.plans:
        console.print(f"wrote {html}")
