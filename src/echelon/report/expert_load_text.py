"""Expert load as text, as wide as the terminal: layers over steps, then the experts of the worst layers.

With colours a line has two experts, in the upper and the lower half of its cells. Without, a line has one expert, and
its cells are the numbers of the colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from echelon.report.expert_load_history import ExpertLoadHistory, LayerLoadHistory
from echelon.report.load_colours import LOAD_LABELS, NO_TOKEN, ON_DARK, colour_index, expert_rows, row_label, row_load
from echelon.training.logging.display import ASCII_SPARK_LEVELS, SPARK_LEVELS, sparkline
from echelon.training.logging.expert_load import short_layer_name

MAX_LAYERS, MAX_DETAILED, MAX_LINES = 24, 3, 16
"""rows of layers, layers with a map of their experts, lines of a map"""
MAX_COLUMN_WIDTH = 4
"""characters per column of steps"""
RIGHT_MARGIN = 22
"""for the numbers right of the rows"""

ColourIndices = list[int | None]
"""one for each column"""


def as_text(history: ExpertLoadHistory, *, width: int = 80, colour: bool = True) -> Text:
    """The text; plain ASCII without colour."""
    rows, maps = ({layer.name for layer in history.worst_layers(most)} for most in (MAX_LAYERS, MAX_DETAILED))
    margin = 2 + max(9, *(len(short_layer_name(name)) for name in rows))
    history = history.downsample(max(8, width - margin - RIGHT_MARGIN))
    each = max(1, min(MAX_COLUMN_WIDTH, (width - margin - RIGHT_MARGIN) // len(history.spans)))
    text = Text(no_wrap=True, overflow="crop")
    text.append("loads of experts", style="bold" if colour else "").append(f": {history.heading()}\n")
    if len(rows) > 1:
        text.append("busiest expert of each layer, to the mean\n")
        for layer in (layer for layer in history.layers if layer.name in rows):
            row = [colour_index(column.mean_figures["max/mean"]) for column in layer.columns]
            text.append(f"{short_layer_name(layer.name):<{margin}}").append(_row(row, each, colour))
            text.append(f"  {layer.last['most']:.2f}, worst {layer.worst_max_over_mean:.2f}\n")
        if left := len(history.layers) - len(rows):
            text.append(f"{left} more layers are better balanced than these\n")
    for layer in (layer for layer in history.layers if layer.name in maps):
        text.append("\n").append(_details(layer, margin, each, colour))
    if left := len(history.layers) - len(maps):
        text.append(f"\n{left} more layer{'s' * (left > 1)}: --html FILE has all of them\n")
    return text.append("\n").append(_legend(width, colour))


def _details(layer: LayerLoadHistory, margin: int, each: int, colour: bool) -> Text:
    rows = expert_rows(layer.experts, 2 * MAX_LINES if colour else MAX_LINES)
    loads = [column.relative_loads for column in layer.columns]
    shown = [[colour_index(row_load(column, row)) for column in loads] for row in rows]
    text = Text()
    text.append(short_layer_name(layer.name), style="bold" if colour else "")
    text.append(f": {'load of each' if len(rows) == layer.experts else 'busiest of each row of'} expert")
    text.append(f"{'s' * (len(rows) < layer.experts)}, to the mean\n")
    lines = [shown[at : at + 2] for at in range(0, len(shown), 2)] if colour else [[row] for row in shown]
    for at, pair in enumerate(lines):
        name = row_label(rows[at * (2 if colour else 1)])
        text.append(f"{name:>{margin - 1}} ").append(_rows(pair, each) if colour else _row(pair[0], each, False))
        text.append("\n")
    for name in layer.columns[0].mean_figures:
        text.append(_line(name, [column.mean_figures[name] for column in layer.columns], margin, each, colour))
    if never := layer.unused_experts():
        text.append(f"no token in the run: expert{'s' * (len(never) > 1)} {_list_first(never)}\n")
    return text


def _line(name: str, values: Sequence[float], margin: int, each: int, colour: bool) -> Text:
    wide = [value for value in values for _ in range(each)]
    bars = sparkline(wide, len(wide), SPARK_LEVELS if colour else ASCII_SPARK_LEVELS)
    text = Text(f"{name:<{margin}}").append(bars, style="magenta" if colour else "")
    digits = 2 if name in ("max/mean", "entropy") else 1
    return text.append(f"  {values[-1]:.{digits}f}, {min(values):.{digits}f} to {max(values):.{digits}f}\n")


def _row(steps: ColourIndices, each: int, colour: bool) -> Text:
    text = Text()
    for step in steps:
        if colour:
            text.append(" " * each, style=f"on {ON_DARK[step]}" if step is not None else "")
        else:
            text.append(("." if step is None else str(step + 1)) * each)
    return text


def _rows(pair: Sequence[ColourIndices], each: int) -> Text:
    """Two rows in the halves of one line; cells without a token stay empty."""
    text, (upper, *lower) = Text(), pair
    for high, low in zip(upper, lower[0] if lower else [None] * len(upper), strict=True):
        if high is not None:
            back = f" on {ON_DARK[low]}" if low is not None else ""
            text.append("▀" * each, style=f"{ON_DARK[high]}{back}")
        else:
            text.append("▄" * each if low is not None else " " * each, style="" if low is None else ON_DARK[low])
    return text


def _legend(width: int, colour: bool) -> Text:
    lines = [Text()]
    for step, name in enumerate((*LOAD_LABELS, NO_TOKEN)):
        if step < len(LOAD_LABELS):
            mark = Text("  ", style=f"on {ON_DARK[step]}") if colour else Text(f"{step + 1}:")
        else:
            mark = Text("empty:" if colour else ".:")
        entry = Text().append(mark).append(f" {name}  ")
        if lines[-1].cell_len + entry.cell_len > width + 2:
            lines.append(Text())
        lines[-1] += entry
    return Text("\n").join([*lines, Text()])


def _list_first(numbers: Sequence[int], limit: int = 12) -> str:
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return " ".join(map(str, numbers[:limit])) + more
