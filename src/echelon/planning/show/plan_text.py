"""Plans in a terminal: a ranked table, then the best plan's time and memory as bars, its reasons, and how to run it.

Where the output is no terminal, rich leaves the colours out; where it cannot show blocks, bars are plain ASCII. Nothing
is said by colour alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from echelon.draw.number_format import format_bytes, format_count, format_seconds, percent
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.priced_plan import Plan, memory_by_stage
from echelon.planning.show import plan_labels

EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR = 8
"""columns of the little bar of memory"""
NARROW = {"step": 11, "memory": BAR + 6, "MFU": 6, "tokens/s": 8, "bubble": 6}
"""columns of a table whose rows have two lines, the most important first"""
WIDE = {**NARROW, "step": 24, "memory": BAR + 17}
"""the same on one line"""
MOST_STAGES = 8
"""whose memory is shown side by side"""
NARROW_LAYOUT, WIDE_LAYOUT = 21, 48
"""columns that a layout has at least; and that it needs before a plan may stand on one line"""
ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def plans_text(
    plans: Sequence[Plan], *, width: int, command: str = "", explanation: Sequence[str] = ()
) -> RenderableType:
    """The plans, best first, for a console of this width. `command` runs the first of them."""
    return _PlanReport(plans=tuple(plans), width=width, command=command, explanation=tuple(explanation))


@dataclass(frozen=True, kw_only=True)
class _PlanReport:
    plans: tuple[Plan, ...]
    width: int
    command: str
    explanation: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pen = _ConsoleWriter(width=min(self.width, options.max_width), is_ascii=options.ascii_only)
        if not self.plans:
            yield Text("no plan")
            yield from pen.bullets(self.explanation)
            return
        best = self.plans[0]
        yield Text(pen.to_ascii(plan_labels.describe_request(best)), style="bold")
        yield from pen.table(self.plans)
        yield Rule(style="dim", characters="-" if pen.is_ascii else "─")
        yield from pen.best(best)
        yield from pen.bullets(plan_labels.all_reasons(best, self.explanation))
        yield from pen.run(best, self.command)


@dataclass(frozen=True, kw_only=True)
class _ConsoleWriter:
    width: int
    is_ascii: bool

    def to_ascii(self, text: str) -> str:
        return text.replace("–", "-").replace("•", "*").encode("ascii", "replace").decode() if self.is_ascii else text

    def table(self, plans: Sequence[Plan]) -> Iterator[RenderableType]:
        """One row for each plan; columns that do not fit are left out, from the right."""
        first = len(str(len(plans)))
        on_one_line = self._layout_width(first, WIDE) >= WIDE_LAYOUT
        columns = dict(WIDE if on_one_line else NARROW)
        while len(columns) > 1 and self._layout_width(first, columns) < NARROW_LAYOUT:
            columns.popitem()
        marks = (mark for plan in plans for mark, _ in plan_labels.warning_marks(plan))
        longest = max(map(len, (*(str(plan.layout) for plan in plans), *marks)))
        width = max(8, min(self._layout_width(first, columns), longest))
        head = ASCII_HEAD if self.is_ascii else box.SIMPLE_HEAD
        table = Table(box=head, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False, border_style="dim")
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("layout", no_wrap=True, width=width)
        for name in columns:
            table.add_column(name, justify="left" if name == "memory" else "right", no_wrap=True)
        for number, plan in enumerate(plans):
            cells = self._cells(plan, on_one_line)
            rank = Text(str(number + 1), style="bold green" if number == 0 else "dim")
            table.add_row(rank, self._layout(plan, width, is_best=number == 0), *(cells[name] for name in columns))
        yield Text()
        yield table
        yield Text()

    def _layout_width(self, first: int, columns: dict[str, int]) -> int:
        """Columns that the others leave to the layout, with two between each."""
        return self.width - first - 2 - sum(columns.values()) - 2 * len(columns)

    def _layout(self, plan: Plan, width: int, *, is_best: bool) -> Text:
        style = "bold" if is_best else ""
        text = Text("\n").join(Text(line, style=style) for line in fold_layout(str(plan.layout), width))
        column = len(text.plain.rpartition("\n")[2])
        for mark, colour in plan_labels.warning_marks(plan):
            fits_line = column + 2 + len(mark) <= width
            text.append("  " if fits_line else "\n").append(mark, style=colour)
            column = (column + 2 if fits_line else 0) + len(mark)
        return text

    def _cells(self, plan: Plan, on_one_line: bool) -> dict[str, Text]:
        between = "  " if on_one_line else "\n"
        interval, size = self.to_ascii(plan_labels.format_interval(plan)), format_bytes(plan.memory.total)
        share = plan_labels.memory_share(plan)
        style = "red" if not plan.fits else "yellow" if share > plan_labels.NEARLY_FULL else "green"
        return {
            "step": Text.assemble((format_seconds(plan.seconds), "bold"), between, (interval, "dim")),
            "tokens/s": Text(format_count(plan.tokens_per_s)),
            "MFU": Text(percent(plan.mfu)),
            "memory": Text.assemble(size, between, (self._gauge(share), style), f" {100 * share:.0f} %"),
            "bubble": Text(percent(plan.bubble)),
        }

    def _gauge(self, share: float) -> str:
        full = min(BAR, max(0, round(BAR * share)))
        solid, empty = "#." if self.is_ascii else "█░"
        return solid * full + empty * (BAR - full)

    def best(self, plan: Plan) -> Iterator[RenderableType]:
        """Time and memory of one plan, as bars."""
        yield Text.assemble("best: ", (str(plan.layout), "bold"))
        figures = ", ".join(f"{name} {value}" for name, value in plan_labels.key_figures(plan))
        yield Text(self.to_ascii(figures), style="dim")
        confidence = plan_labels.describe_confidence(plan)
        yield Text(self.to_ascii(confidence), style="yellow" if plan.extrapolated else "dim")
        yield Text("\ntime of a step by cause", style="bold cyan")
        yield self._bars(plan_labels.largest_first(plan_labels.time_bars(plan)))
        memory = f"\nmemory of {plan_labels.describe_fullest_rank(plan)}: {plan_labels.describe_memory(plan)}"
        yield Text(memory, style="bold cyan" if plan.fits else "bold red")
        yield self._bars(plan_labels.largest_first(plan_labels.memory_bars(plan)))
        if 1 < plan.layout.pp <= MOST_STAGES:
            yield Text("\nGiB on a rank of each stage", style="bold cyan")
            yield self._stages(plan)

    def _stages(self, plan: Plan) -> Table:
        """Memory by category and stage, the fullest marked."""
        ranks = memory_by_stage(plan.scenario)
        fullest = max(range(len(ranks)), key=lambda stage: ranks[stage].total)
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column()
        for _ in ranks:
            table.add_column(justify="right", no_wrap=True)
        marks = [f"{stage}{'*' if stage == fullest else ''}" for stage in range(len(ranks))]
        table.add_row("  stage (* the fullest)", *marks, style="dim")
        for key, word in plan_labels.CATEGORIES.items():
            sizes = [rank.parts.get(key, 0) / GIB for rank in ranks]
            if any(sizes):
                table.add_row(f"  {word.name}", *(f"{size:.1f}" for size in sizes))
        table.add_row("  together", *(f"{rank.total / GIB:.1f}" for rank in ranks), style="bold")
        return table

    def _bars(self, bars: Sequence[tuple[plan_labels.LabelledBar, str]]) -> Table:
        longest = max((len(bar.label.name) for bar, _ in bars), default=0)
        width = self.width - longest - max((len(value) for _, value in bars), default=0) - 7 - 8
        most = max((bar.value for bar, _ in bars), default=1.0)
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(no_wrap=False)
        for justify in ("right", "right", "left"):
            table.add_column(no_wrap=True, justify=justify)
        for bar, value in bars:
            long = self._bar(bar.value / most, min(60, width)) if width >= 4 else ""
            share = f"{100 * bar.share:.1f} %"
            table.add_row(f"  {bar.label.name}", Text(value, style="bold"), share, Text(long, style=bar.label.colour))
        return table

    def _bar(self, share: float, columns: int) -> str:
        if self.is_ascii:
            return "#" * max(1, round(share * columns))
        full, rest = divmod(max(1, round(8 * share * columns)), 8)
        return "█" * full + EIGHTHS[rest].strip()

    def bullets(self, lines: Sequence[str]) -> Iterator[RenderableType]:
        if not lines:
            return
        table = Table.grid(padding=(0, 1), pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(max_width=max(20, min(self.width, 110) - 4))
        for line in lines:
            table.add_row(Text(self.to_ascii("  •"), style="cyan"), Text(self.to_ascii(line)))
        yield Text("\nwhy", style="bold cyan")
        yield table

    def run(self, plan: Plan, command: str) -> Iterator[RenderableType]:
        """How to run it, on lines that a shell joins; or why it cannot be."""
        if reason := plan_labels.why_not_run(plan):
            yield Text(f"\n{reason}", style="bold yellow")
        elif command:
            yield Text("\nrun it", style="bold cyan")
            yield Text("\n".join(wrap_command(command, self.width)), style="green", overflow="fold")


def fold_layout(layout: str, width: int) -> list[str]:
    """A layout on lines of at most this width, broken behind commas; a longer key is cut."""
    lines = [""]
    for piece in re.findall(r"[^,]+,?", layout):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        for start in range(0, len(piece), width):
            if start:
                lines.append("")
            lines[-1] += piece[start : start + width]
    return lines


def wrap_command(command: str, width: int) -> list[str]:
    """A command on lines that a shell joins to the same words: broken before options, else inside a word."""
    if len(command) + 2 <= width:
        return [f"  {command}"]
    lines: list[str] = []
    for piece in re.split(r" (?=--)", command):
        line = f"  {piece}" if not lines else f"    {piece}"
        # A shell joins what is left and right of a backslash at the end of a line, but not between quotes.
        while len(line) + 2 > width and not {"'", "\\"} & {*piece}:
            cut = line.rfind(",", 8, width - 1) + 1 or width - 1
            lines.append(f"{line[:cut]}\\")
            line = line[cut:]
        lines.append(f"{line} \\")
    lines[-1] = lines[-1].removesuffix(" \\")
    return lines
