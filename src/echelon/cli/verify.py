"""`echelon verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.cli_errors import print_json, report_errors
from echelon.cli.cli_options import AsJson
from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.verification.fold_layout import DEFAULT_MAX_RANKS

if TYPE_CHECKING:
    from echelon.verification.verified_config import Replacement
    from echelon.verification.verifier import LayoutVerdict, Report
    from echelon.verification.verify_request import ResolvedRequest

EXAMPLES = """[bold]Examples[/bold]\n
echelon verify\n
echelon verify --model gpt-tiny --layouts "dp=2; tp=2,zero=1"\n
echelon verify --model my_model.py:build --layouts "dp=2,zero=3"\n
echelon verify --model llama-70b --layouts "dp=4,tp=8,pp=2,schedule=zb-v" --max-ranks 16\n
echelon verify --set optimizer.name=muon --set optimizer.ema=0.99 --layouts "dp=2,tp=2,zero=1"

echelon verify --as-configured --set dtype=bfloat16 --set optimizer.states=int8 --layouts "dp=2,zero=1"

echelon verify --layouts "tp=2" --leave-out tp:reduce_scatter
"""


def command(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; its model is shrunk, and its layout verified.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key; may be repeated.")
    ] = None,
    layouts: Annotated[
        str, typer.Option(help="Layouts, separated by semicolons. Default: the usual ones, up to 8 ranks.")
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="A named size, a Hugging Face config.json, or file.py:factory of a custom model, with "
            "batch(rows, seed) in the same file."
        ),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Every layout with every option: more than an hour.")] = False,
    as_configured: Annotated[
        bool, typer.Option("--as-configured", help="In the run's precision, kernels and compression, on its device.")
    ] = False,
    leave_out: Annotated[
        str, typer.Option(metavar="AXIS:COLLECTIVE", help="Leave out a collective, to see verify fail: tp:all_gather.")
    ] = "",
    max_ranks: Annotated[
        int, typer.Option(help="Fold larger layouts to this many ranks, dp first; the verdict says what was folded.")
    ] = DEFAULT_MAX_RANKS,
    as_json: AsJson = False,
) -> None:
    """Check layouts against one device, on a shrunken model, in float64 or as configured."""
    with report_errors(as_json):
        from echelon.verification.verify_request import VerifyRequest

        others = (config, model, layouts, settings, as_configured, max_ranks != DEFAULT_MAX_RANKS)
        if every and any(others):
            rule, legal = "verifies all built-in models and layouts", "--all alone, or the others without it"
            raise ValidationError([ValidationIssue("all", "true", rule, legal=legal)])
        request = VerifyRequest(
            config=config,
            settings=settings or (),
            layouts=layouts,
            model=model,
            leave_out=leave_out,
            max_ranks=max_ranks,
            as_configured=as_configured,
        ).resolve()
        shown = _VerdictTable(as_json, as_configured=as_configured)
        shown.replaced(request.replaced)
        report = _verify(request, leave_out, every, shown)
    if as_json:
        print_json(report.to_json())
    else:
        shown.summary(report)
    raise typer.Exit(0 if report.passed else 1)


def _verify(request: ResolvedRequest, leave_out: str, every: bool, shown: _VerdictTable) -> Report:
    if every:
        from echelon.verification.layout_matrix import verify_all

        return verify_all(leave_out, shown.row)
    from echelon.launch.rank_pool import RankPool
    from echelon.verification.verifier import PRELOAD, Verifier

    with RankPool(preload=PRELOAD, device=request.case.config.device) as pool:
        report = Verifier(pool, request.case, leave_out).report(request.layouts, shown.row)
    return replace(report, replaced=request.replaced)


class _VerdictTable:
    """Prints each layout's verdict as it comes, with the first difference of a failure."""

    def __init__(self, quiet: bool, *, as_configured: bool = False):
        from rich.console import Console

        self.tolerance = "to 1e-10, and to 1e-9 of each tensor's norm"
        if as_configured:
            self.tolerance = "as configured, to three times what its precision costs a plain loop"
        self.console = Console(quiet=quiet)
        self.model = ""

    def replaced(self, replacements: Sequence[Replacement], indent: str = "") -> None:
        """Say in one line what of the configuration is not run as it is, and why."""
        if replacements:
            by_reason: dict[str, list[str]] = {}
            for each in replacements:
                by_reason.setdefault(each.reason, []).append(str(each))
            parts = [f"{', '.join(values)} ({reason})" for reason, values in by_reason.items()]
            self.console.print(f"{indent}replaced: {'; '.join(parts)}", style="yellow", soft_wrap=True, highlight=False)

    def row(self, verdict: LayoutVerdict, label: str = "") -> None:
        from rich.text import Text

        if verdict.model != self.model:
            self.model = verdict.model
            self.console.print(Text(f"model {verdict.model}", style="dim"), soft_wrap=True)
        word = Text("PASS", style="bold green") if verdict.passed else Text("FAIL", style="bold red")
        name = f"{verdict.layout}{'  ' + label if label else ''}"
        errors = f"error {verdict.max_error:8.1e}   relative {verdict.max_relative:8.1e} of {verdict.tolerance:.1e}"
        line = Text.assemble(word, f"  {name:<52} {errors}   {verdict.seconds:5.1f} s")
        self.console.print(line, soft_wrap=True)
        if verdict.folded:
            self.console.print(Text(f"      folded: {verdict.folded}", style="yellow"), soft_wrap=True)
        self.replaced(verdict.replaced, indent="      ")
        if verdict.untested:
            shown = ", ".join(verdict.untested[:3]) + (", …" if len(verdict.untested) > 3 else "")
            untested = f"not tested: updates of {len(verdict.untested)} parameters ({shown}); rounding exceeds them"
            self.console.print(Text("      " + untested, style="yellow"), soft_wrap=True)
        for text in _explain(verdict):
            self.console.print(Text("      " + text, style="red"), soft_wrap=True)

    def summary(self, report: Report) -> None:
        count, total = sum(verdict.passed for verdict in report.verdicts), len(report.verdicts)
        seconds = sum(verdict.seconds for verdict in report.verdicts)
        style = "bold green" if report.passed else "bold red"
        equal = f"compute what one device computes, {self.tolerance}"
        outcome = equal if report.passed else "pass"
        folded = sum(bool(verdict.folded) for verdict in report.verdicts)
        scope = f", {folded} of them folded to fewer ranks or microbatches" if folded else ""
        line = f"[{style}]{count} of {total}[/] layouts {outcome}{scope} ({seconds:.0f} s)"
        self.console.print(line, soft_wrap=True)


def _explain(verdict: LayoutVerdict) -> list[str]:
    first = verdict.first_difference
    trouble = verdict.trouble.splitlines()
    if first is None:
        return trouble
    what = f"{first.kind} of {first.name}" if first.name else first.kind
    errors = f"error {first.error:.1e}, relative {first.relative:.1e}"
    difference = f"{what} at step {first.step + 1}, {errors}; axis {verdict.axis}"
    return [f"first difference: {difference}", *trouble]
