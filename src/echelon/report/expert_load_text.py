"""Loads of experts as text, as wide as the terminal: layers over steps, then the experts of the worst layers.

With colours a line has two experts, one in the upper half of its cells and one in the lower. Without, a line has one,
and its cells are the numbers of the scale's steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from echelon.report.expert_load_history import History, Layer
from echelon.report.load_colours import NAMES, NOTHING, ON_DARK, label, load_of, rows_of, step_of
from echelon.training.logging.display import ASCII_LEVELS, LEVELS, sparkline
from echelon.training.logging.expert_load import short_name

LAYERS, DETAILS, LINES = 24, 3, 16
"""at most: rows of layers, layers with a map of their own, lines of such a map"""
WIDEST = 4
"""characters of a column of steps"""
RIGHT = 22
"""for numbers beside rows"""

Steps = list[int | None]
"""of the scale, one for each column"""


def as_text(history: History, *, width: int = 80, colour: bool = True) -> Text:
    """The picture; plain ASCII without colour."""
    rows, maps = ({layer.name for layer in history.worst(most)} for most in (LAYERS, DETAILS))
    margin = 2 + max(9, *(len(short_name(name)) for name in rows))
    history = history.fitted(max(8, width - margin - RIGHT))
    each = max(1, min(WIDEST, (width - margin - RIGHT) // len(history.spans)))
    text = Text(no_wrap=True, overflow="crop")
    text.append("loads of experts", style="bold" if colour else "").append(f": {history.heading()}\n")
    if len(rows) > 1:
        text.append("busiest expert of each layer, to the mean\n")
        for layer in (layer for layer in history.layers if layer.name in rows):
            row = [step_of(column.figures["max/mean"]) for column in layer.columns]
            text.append(f"{short_name(layer.name):<{margin}}").append(_row(row, each, colour))
            text.append(f"  {layer.last['most']:.2f}, worst {layer.worst:.2f}\n")
        if left := len(history.layers) - len(rows):
            text.append(f"{left} more layers are more even than these\n")
    for layer in (layer for layer in history.layers if layer.name in maps):
        text.append("\n").append(_details(layer, margin, each, colour))
    if left := len(history.layers) - len(maps):
        text.append(f"\n{left} more layer{'s' * (left > 1)}: --html FILE has all of them\n")
    return text.append("\n").append(_legend(width, colour))


def _details(layer: Layer, margin: int, each: int, colour: bool) -> Text:
    rows = rows_of(layer.experts, 2 * LINES if colour else LINES)
    loads = [column.loads for column in layer.columns]
    shown = [[step_of(load_of(column, row)) for column in loads] for row in rows]
    text = Text()
    text.append(short_name(layer.name), style="bold" if colour else "")
    text.append(f": {'load of each' if len(rows) == layer.experts else 'busiest of each row of'} expert")
    text.append(f"{'s' * (len(rows) < layer.experts)}, to the mean\n")
    lines = [shown[at : at + 2] for at in range(0, len(shown), 2)] if colour else [[row] for row in shown]
    for at, pair in enumerate(lines):
        name = label(rows[at * (2 if colour else 1)])
        text.append(f"{name:>{margin - 1}} ").append(_rows(pair, each) if colour else _row(pair[0], each, False))
        text.append("\n")
    for name in layer.columns[0].figures:
        text.append(_line(name, [column.figures[name] for column in layer.columns], margin, each, colour))
    if never := layer.never():
        text.append(f"no token in the run: expert{'s' * (len(never) > 1)} {_few(never)}\n")
    return text


def _line(name: str, values: Sequence[float], margin: int, each: int, colour: bool) -> Text:
    wide = [value for value in values for _ in range(each)]
    bars = sparkline(wide, len(wide), LEVELS if colour else ASCII_LEVELS)
    text = Text(f"{name:<{margin}}").append(bars, style="magenta" if colour else "")
    digits = 2 if name in ("max/mean", "entropy") else 1
    return text.append(f"  {values[-1]:.{digits}f}, {min(values):.{digits}f} to {max(values):.{digits}f}\n")


def _row(steps: Steps, each: int, colour: bool) -> Text:
    text = Text()
    for step in steps:
        if colour:
            text.append(" " * each, style=f"on {ON_DARK[step]}" if step is not None else "")
        else:
            text.append(("." if step is None else str(step + 1)) * each)
    return text


def _rows(pair: Sequence[Steps], each: int) -> Text:
    """Two rows in the halves of one; what is empty stays as the terminal has it."""
    text = Text()
    upper = pair[0]
    lower: Steps = pair[1] if len(pair) > 1 else [None] * len(upper)
    for high, low in zip(upper, lower, strict=True):
        if high is not None:
            back = f" on {ON_DARK[low]}" if low is not None else ""
            text.append("▀" * each, style=f"{ON_DARK[high]}{back}")
        else:
            text.append("▄" * each if low is not None else " " * each, style="" if low is None else ON_DARK[low])
    return text


def _legend(width: int, colour: bool) -> Text:
    lines = [Text()]
    for step, name in enumerate((*NAMES, NOTHING)):
        is_step = step < len(NAMES)
        mark = f"{step + 1}:" if is_step else "empty:" if colour else ".:"
        entry = Text("  " if colour and is_step else mark, style=f"on {ON_DARK[step]}" if colour and is_step else "")
        entry = Text("").append(entry).append(f" {name}  ")
        if lines[-1].cell_len + entry.cell_len > width + 2:
            lines.append(Text())
        lines[-1] += entry
    return Text("\n").join([*lines, Text()])


def _few(numbers: Sequence[int], most: int = 12) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return " ".join(map(str, numbers[:most])) + more
