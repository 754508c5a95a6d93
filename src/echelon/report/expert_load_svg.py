"""Expert load as SVG: layers over steps, then a heat map of experts over steps per layer, with curves below.

The colours follow the reader's light or dark mode. Cells of one colour are one path, and neighbours in a row one shape
of it, so that the file stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from echelon.draw import svg_writer
from echelon.draw.number_format import ticks
from echelon.report import load_colours
from echelon.report.expert_load_history import ExpertLoadHistory, LayerLoadHistory
from echelon.report.load_colours import LOAD_LABELS, NO_TOKEN, ON_DARK, ON_LIGHT, colour_index
from echelon.training.logging.expert_load import short_layer_name

MARGIN, LEFT, MAP_WIDTH, RIGHT = 24.0, 116.0, 744.0, 116.0
WIDTH = LEFT + MAP_WIDTH + RIGHT
MAX_EXPERT_ROWS = 256
MAX_ROW_HEIGHT, MIN_ROW_HEIGHT = 14.0, 1.0
"""of a row of a heat map"""
MIN_MARKED_HEIGHT = 4.0
"""lower rows leave cells without a token empty; higher ones mark them with a line"""
MAP_HEIGHT = 224.0
STRIP_HEIGHT = 30.0
"""of a curve below a heat map"""
LIGHT = svg_writer.LIGHT_THEME | {"empty": "#b3440f"}
DARK = svg_writer.DARK_THEME | {"empty": "#f08a52"}
LINE_STYLE = "text{font-variant-numeric:tabular-nums}.thin{fill:none;stroke-width:1.6;stroke-linejoin:round}"

MapRow = tuple[str, list[int | None]]
"""its name, and the colour indices of its cells"""


@dataclass(frozen=True)
class _StepScale:
    """The x coordinates of steps."""

    first: int
    last: int
    spans: Sequence[tuple[int, int]]

    def x(self, step: float) -> float:
        return LEFT + MAP_WIDTH * (step - self.first) / (self.last - self.first + 1)

    def cells(self, steps: Sequence[int | None]) -> Iterator[tuple[int | None, float, float]]:
        """Runs of cells of one colour: (colour index, x, width)."""
        for step, group in groupby(range(len(steps)), key=lambda at: steps[at]):
            places = list(group)
            start = self.x(self.spans[places[0]][0])
            yield step, start, self.x(self.spans[places[-1]][1] + 1) - start


def as_svg(history: ExpertLoadHistory, *, light: bool = False) -> str:
    """The text of an SVG file; `light` keeps light colours in dark mode, beside pictures without a dark mode."""
    frame = _StepScale(*history.steps, history.spans)
    shown = history.shown_layers()
    title = f"loads of experts: {history.heading()}"
    parts = [_text(MARGIN, 42, history.title, 22, 650)]
    thin = any(MAP_HEIGHT / layer.experts < MIN_MARKED_HEIGHT for layer in shown)
    parts += [_text(MARGIN, 66, history.heading(), 14, css_class="pale"), *_legend(96, thin)]
    y = 118.0
    if len(history.layers) > 1:
        rows = [
            (short_layer_name(layer.name), [colour_index(column.mean_figures["max/mean"]) for column in layer.columns])
            for layer in history.layers
        ]
        notes = [f"{layer.last['most']:.2f}, worst {layer.worst_max_over_mean:.2f}" for layer in history.layers]
        parts.append(_text(LEFT + MAP_WIDTH + 8, y + 26, "last step, worst", 11, css_class="pale"))
        more, y = _heat_map("busiest expert of each layer, to the mean", rows, frame, y, notes)
        parts += more
    if len(shown) < len(history.layers):
        note = f"the {len(shown)} least balanced of {len(history.layers)} layers in the second half of the steps"
        y += 28
        parts.append(_text(MARGIN, y, f"Below: {note}.", 13, css_class="pale"))
    for layer in shown:
        more, y = _layer(layer, frame, y)
        parts += more
    style = _style(LIGHT, ON_LIGHT) + ("" if light else svg_writer.in_dark_mode(_style(DARK, ON_DARK))) + LINE_STYLE
    return svg_writer.document(parts, WIDTH, y + 20, title=title, style=style)


def _style(colours: dict[str, str], scale: Sequence[str]) -> str:
    colours = colours | {f"s{index}": colour for index, colour in enumerate(scale)}
    return svg_writer.fill_classes(colours) + f".thin{{stroke:{colours['ink']}}}"


def _legend(y: float, thin: bool) -> Iterator[str]:
    yield _text(MARGIN, y, "load to the mean", 13, css_class="pale")
    x = MARGIN + 124
    for step, name in enumerate(LOAD_LABELS):
        yield f'<rect class="s{step}" x="{x:g}" y="{y - 11:g}" width="22" height="14"/>'
        yield _text(x + 27, y, name, 12, css_class="pale")
        x += 27 + 7 * len(name) + 14
    if thin:
        yield _text(x, y, f"empty: {NO_TOKEN}", 12, css_class="pale")
    else:
        yield f'<rect class="empty" x="{x:g}" y="{y - 5:g}" width="22" height="2"/>'
        yield _text(x + 27, y, NO_TOKEN, 12, css_class="pale")


def _layer(layer: LayerLoadHistory, frame: _StepScale, y: float) -> tuple[list[str], float]:
    """The elements of a layer from `y` on, and the y of its end."""
    kinds = load_colours.expert_rows(layer.experts, MAX_EXPERT_ROWS)
    loads = [column.relative_loads for column in layer.columns]
    rows: list[MapRow] = [
        (load_colours.row_label(row), [colour_index(load_colours.row_load(column, row)) for column in loads])
        for row in kinds
    ]
    title = f"{short_layer_name(layer.name)}: experts"
    if len(kinds) < layer.experts:
        title += ", in each row the busiest"
    if never := layer.unused_experts():
        few = " ".join(map(str, never[:8])) + (f" and {len(never) - 8} more" if len(never) > 8 else "")
        title += f" · no token in the run: {few}"
    parts, y = _heat_map(title, rows, frame, y, axis=False)
    for name in layer.columns[0].mean_figures:
        y += 10
        parts += _strip(name, [column.mean_figures[name] for column in layer.columns], frame, y)
        y += STRIP_HEIGHT
    return parts + list(_axis(frame, y + 4)), y + 24


def _heat_map(
    title: str, rows: Sequence[MapRow], frame: _StepScale, y: float, notes: Sequence[str] = (), *, axis: bool = True
) -> tuple[list[str], float]:
    parts = [_text(MARGIN, y + 26, title, 15, 600)]
    y += 38
    lowest, map_height = (8.0, 480.0) if notes else (MIN_ROW_HEIGHT, MAP_HEIGHT)
    high = max(lowest, min(MAX_ROW_HEIGHT, map_height / len(rows)))
    gap = 1.0 if high >= 12 else 0.0
    shapes: dict[str, list[str]] = {}
    every = -(-12 // int(high)) if high < 12 else 1
    for at, (name, steps) in enumerate(rows):
        top = y + at * high
        for step, x, width in frame.cells(steps):
            if step is None and high < MIN_MARKED_HEIGHT:
                continue
            css_class, tall = ("empty", 2.0) if step is None else (f"s{step}", high - gap)
            y_ = top + (high - gap - tall) / 2
            shapes.setdefault(css_class, []).append(f"M{x:.1f} {y_:g}h{width:.1f}v{tall:g}h-{width:.1f}z")
        if at % every == 0:
            size = min(12.0, max(10.0, high))
            parts.append(_text(LEFT - 10, top + high / 2 + 4, name, size, css_class="pale", anchor="end"))
            if notes:
                parts.append(_text(LEFT + MAP_WIDTH + 8, top + high / 2 + 4, notes[at], size, css_class="pale"))
    edges = ' shape-rendering="crispEdges"'
    parts += [f'<path class="{name}"{edges} d="{"".join(paths)}"/>' for name, paths in sorted(shapes.items())]
    y += len(rows) * high
    if axis:
        parts += _axis(frame, y + 4)
        y += 24
    return parts, y


def _strip(name: str, values: Sequence[float], frame: _StepScale, y: float) -> Iterator[str]:
    """A curve over the steps, from 0 to its maximum (entropy: to 1)."""
    top = 1.0 if name == "entropy" else max(values) or 1.0
    number = "{:.1f}".format if name in ("dead", "dropped %") else "{:.2f}".format
    yield f'<rect class="line" x="{LEFT:g}" y="{y + STRIP_HEIGHT:g}" width="{MAP_WIDTH:g}" height="1"/>'
    places = [
        (frame.x((start + end + 1) / 2), y + STRIP_HEIGHT * (1 - value / top))
        for (start, end), value in zip(frame.spans, values, strict=True)
    ]
    if len(places) == 1:
        places = [(LEFT, places[0][1]), (LEFT + MAP_WIDTH, places[0][1])]
    yield f'<path class="thin" d="M{"L".join(f"{x:.1f} {high:.1f}" for x, high in places)}"/>'
    yield _text(LEFT - 10, y + STRIP_HEIGHT / 2 + 6, name, 12, css_class="pale", anchor="end")
    right, middle = LEFT + MAP_WIDTH + 8, y + STRIP_HEIGHT / 2
    yield _text(right, middle - 2, f"{number(values[-1])} at the end", 11, css_class="pale")
    yield _text(right, middle + 12, f"{number(min(values))} to {number(max(values))}", 11, css_class="pale")


def _axis(frame: _StepScale, y: float) -> Iterator[str]:
    round_ = ticks(frame.last - frame.first + 1, 10)
    each = max(1, round(round_[1])) if len(round_) > 1 else frame.last + 1
    later = range(frame.first // each * each + each, frame.last + 1, each)
    for step in (frame.first, *(step for step in later if frame.x(step) - LEFT > 45)):
        x = frame.x(step + 0.5)
        yield f'<rect class="line" x="{x:.1f}" y="{y - 3:g}" width="1" height="4"/>'
        yield _text(x, y + 12, f"{'step ' * (step == frame.first)}{step:,}", 11, css_class="pale", anchor="middle")


def _text(
    x: float, y: float, text: str, size: float, weight: int = 400, *, css_class: str = "ink", anchor: str = "start"
) -> str:
    return svg_writer.text(x, y, text, size, css_class=css_class, weight=weight, anchor=anchor)
