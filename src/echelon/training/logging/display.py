"""The terminal display of a run: resolved settings, live progress, evaluations, and a summary with sample text.

Rank 0 owns one. On a terminal the progress is redrawn in place; elsewhere (a file, a log collector) it is one plain
line every few seconds. A quiet display prints nothing, so that `--json` leaves standard output to its one object.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from echelon.training.logging.display_stream import DisplayStream
from echelon.training.logging.expert_load import LoadBalance

SPARK_LEVELS = "▁▂▃▄▅▆▇█"
ASCII_SPARK_LEVELS = "_.-:=+*#"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run after a step."""

    step: int
    """Steps done."""
    loss: float
    """Mean loss per valid target of this step."""
    tokens_per_s: float
    """Over all ranks."""
    mfu: float
    """Model FLOPs utilisation."""
    hfu: float
    """Hardware FLOPs utilisation."""
    memory: int
    """Peak bytes of the fullest rank."""
    experts: LoadBalance | None = None
    """Expert load balance; None for a model without experts."""

    def record(self) -> dict[str, float]:
        """Return the fields of the log record; expert loads have a record of their own."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "experts"}


ResolvedSetting = tuple[str, str, str]
"""A setting that was resolved for the user: name, value, reason."""


class Display:
    """The progress display of one run of `total` steps; a context manager around the loop."""

    def __init__(
        self,
        total: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        print_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._console = Console(quiet=True) if quiet else console or _standard_output()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._print_every_s, self._clock = print_every_s, clock
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._losses = LossHistory()
        # Speed of the last steps, not of the entire run: the first step compiles and allocates.
        self._times: deque[tuple[float, int]] = deque(maxlen=50)
        self._last_print = -math.inf

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print_settings(self, title: str, settings: Sequence[ResolvedSetting]) -> None:
        """Print every resolved setting, before the first step."""
        self._print_table(title, settings, "cyan")

    def show_step(self, progress: Progress) -> None:
        is_first, self._progress = self._progress is None, progress
        self._losses.add(progress.loss)
        now = self._clock()
        self._times.append((now, progress.step))
        is_edge = is_first or progress.step >= self._total
        if not self._is_live and (is_edge or now - self._last_print >= self._print_every_s):
            self._last_print = now
            experts = [f"{name} {value}" for name, value, _ in progress.experts.figures()] if progress.experts else []
            figures = [f"{name} {value}" for name, value in self._figures()]
            self._print_line("  ".join([f"step {progress.step}/{self._total}", *figures, *experts]))

    def print_evaluation(self, step: int, loss: float) -> None:
        line = f"evaluation at step {step}: loss {format_number(loss)}, perplexity {format_number(perplexity(loss))}"
        self._print_line(line, style="green")

    def print_note(self, text: str) -> None:
        self._print_line(f"note: {text}", style="yellow")

    def print_summary(self, title: str, rows: Sequence[tuple[str, str]], *, prompt: str = "", sample: str = "") -> None:
        """Print the results, and the text that the model generated after `prompt`."""
        below: list[RenderableType] = []
        if sample:
            written = Text.assemble((self._printable(prompt), "bold"), self._printable(sample))
            below = [Rule("generated text", style="dim green"), written]
        self._print_table(title, rows, "green", *below)
        if sample and not self._is_live:
            self._print_line("  sample:")
            for line in self._printable(prompt + sample).splitlines():
                self._print_line(f"    | {line}")

    def _print_table(
        self, title: str, rows: Sequence[tuple[str, str] | ResolvedSetting], color: str, *below: RenderableType
    ) -> None:
        """Print rows of name, value and perhaps a reason: as a panel on a terminal, else line by line."""
        if not self._is_live:
            self._print_line(title)
            for name, value, *reasons in rows:
                self._print_line(f"  {name}: {value}" + "".join(f" ({reason})" for reason in reasons if reason))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="bold")
        if any(len(cells) > 2 for cells in rows):
            table.add_column(style="dim", ratio=1)
        for cells in rows:
            table.add_row(*(Text(cell) for cell in cells))
        heading = Text(title, style="bold")
        self._console.print(Panel(Group(table, *below), title=heading, title_align="left", border_style=color))

    def _figures(self) -> list[tuple[str, str]]:
        assert self._progress is not None
        (start, first), (end, last) = self._times[0], self._times[-1]
        seconds_left = (end - start) / (last - first) * (self._total - last) if last > first else math.nan
        return [
            ("loss", format_number(self._progress.loss)),
            ("tokens/s", format_count(self._progress.tokens_per_s)),
            ("MFU", format_percent(self._progress.mfu)),
            ("HFU", format_percent(self._progress.hfu)),
            ("memory", format_bytes(self._progress.memory)),
            ("left", format_duration(seconds_left)),
        ]

    def _render(self) -> RenderableType:
        if self._progress is None:
            return Text("waiting for the first step", style="dim")
        bar = Table.grid(padding=(0, 1), expand=True)
        for _ in range(2):
            bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        step, total = self._progress.step, self._total
        bar.add_row(
            Text("step", style="cyan"),
            Text(f"{step}/{total}", style="bold"),
            ProgressBar(total=total, completed=step, complete_style="cyan", finished_style="green"),
            Text(f"{step / total:4.0%}", style="bold"),
        )
        loss, *others = (Text.assemble((name, "cyan"), (f" {value}", "bold")) for name, value in self._figures())
        levels = ASCII_SPARK_LEVELS if self._console.options.ascii_only else SPARK_LEVELS
        loss.append(" " + sparkline(self._losses.means, 24, levels), style="magenta")
        figures = Text("   ").join([loss, *others])
        lines = [figures] if figures.cell_len <= self._console.width else [loss, Text("   ").join(others)]
        return Group(bar, *lines, *self._experts())

    def _experts(self) -> list[Text]:
        """Expert load balance, wrapped to the width; suspicious values are yellow."""
        if self._progress is None or self._progress.experts is None:
            return []
        lines = [Text.assemble(("experts", "cyan"))]
        for name, value, stands_out in self._progress.experts.figures():
            cell = Text.assemble((name, "cyan"), (f" {value}", "bold yellow" if stands_out else "bold"))
            if lines[-1].cell_len + 3 + cell.cell_len > self._console.width:
                lines.append(Text("       "))
            lines[-1] += Text("   ") + cell
        return lines

    def _print_line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=not self._is_live)

    def _printable(self, text: str) -> str:
        """Generated text without control characters and what the console cannot encode."""
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text.expandtabs(4))
        return shown.encode(self._console.encoding, "replace").decode(self._console.encoding)


def _standard_output() -> Console:
    stream: Any = DisplayStream(sys.stdout)
    return Console(file=stream)


class LossHistory:
    """Losses of a run in bounded memory: means over intervals whose length doubles as the run grows."""

    def __init__(self, capacity: int = 240) -> None:
        self.means: list[float] = []
        self._capacity, self._length = capacity, 1
        self._interval: list[float] = []

    def add(self, value: float) -> None:
        self._interval.append(value)
        if len(self._interval) < self._length:
            return
        self.means.append(sum(self._interval) / len(self._interval))
        self._interval.clear()
        if len(self.means) == self._capacity:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(first + second) / 2 for first, second in pairs]
            self._length *= 2


def sparkline(values: Sequence[float], width: int, levels: str = SPARK_LEVELS) -> str:
    """Draw values as at most `width` bars, each the mean of an interval; "!" where a value is not finite."""
    columns = min(width, len(values))
    shares = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    top = len(levels) - 1
    return "".join(
        levels[round((mean - low) / span * top) if span else 0] if math.isfinite(mean) else "!" for mean in means
    )


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_number(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 1000 or not math.isfinite(value) else f"{value:.3f}"


def format_percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def format_count(count: float) -> str:
    """12.3k for 12,345."""
    if not math.isfinite(count):
        return "-"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return f"{count:.0f}"


def format_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def format_duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
