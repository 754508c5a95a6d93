"""The breakdown of a step as SVG: for each part the measured time over its floor, and the numbers.

It is drawn from a file of profiles, without a device. The colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from echelon.bench.profile.breakdown import Breakdown
from echelon.draw import svg_writer

WIDTH, MARGIN = 900, 24
LEFT, BARS = 164, 440
"""the x of the bars, and the length of the longest"""
COLUMNS = {"measured": 704, "floor": 784, "above it": 876}
"""the x at which numbers end"""
ROW, THICK, THIN = 30, 12, 6
LIGHT = svg_writer.LIGHT_THEME | {"measured": "#1f5fa8", "floor": "#3fa796", "more": "#b3440f"}
DARK = svg_writer.DARK_THEME | {"measured": "#5b9ce0", "floor": "#2f8576", "more": "#f08a52"}


def as_svg(breakdowns: Sequence[Breakdown]) -> str:
    """Draw breakdowns one below the other."""
    elements: list[str] = []
    y = 8.0
    for breakdown in breakdowns:
        panel, y = _panel(breakdown, y)
        elements += panel
    style = svg_writer.fill_classes(LIGHT) + svg_writer.in_dark_mode(svg_writer.fill_classes(DARK))
    style += "text{font-variant-numeric:tabular-nums}"
    title = "; ".join(_title(breakdown) for breakdown in breakdowns)
    return svg_writer.document(elements, WIDTH, y + 16, title=title, style=style)


def _title(breakdown: Breakdown) -> str:
    times = f"a step of {_ms(breakdown.total)} ms over a floor of {_ms(breakdown.floor)} ms"
    return f"{breakdown.shape} in {breakdown.precision}: {times}"


def _panel(breakdown: Breakdown, y: float) -> tuple[list[str], float]:
    """The elements of one breakdown from `y` on, and the y of its end."""
    parts = [_text(MARGIN, y + 28, _title(breakdown), 19, weight=650)]
    y += 28
    for line in textwrap.wrap(_subtitle(breakdown), int((WIDTH - 2 * MARGIN) / (13 * svg_writer.LETTER_WIDTH))):
        y += 20
        parts.append(_text(MARGIN, y, line, 13, css_class="pale"))
    y += 30
    x = float(LEFT)
    for name, thick in (("measured", THICK), ("floor", THIN)):
        parts.append(_bar(x, y - 4 - thick / 2, 14, thick, name))
        parts.append(_text(x + 20, y, name, 12, css_class="pale"))
        x += 100
    parts += [_text(at, y, f"{name}, ms", 12, css_class="pale", anchor="end") for name, at in COLUMNS.items()]
    y += 10
    longest = max(max(part.seconds, part.floor_s) for part in breakdown.parts)
    for part in breakdown.parts:
        parts += _row(part.name, part.seconds, part.floor_s, y, BARS / longest if longest else 0.0)
        y += ROW
    parts.append(f'<rect class="line" x="{MARGIN}" y="{y + 2:g}" width="{WIDTH - 2 * MARGIN}" height="1"/>')
    parts += _row("together", breakdown.total, breakdown.floor, y + 4, 0.0, weight=650)
    return parts, y + ROW + 16


def _subtitle(breakdown: Breakdown) -> str:
    parts = [f"{breakdown.seq:,} x {breakdown.batch} tokens on {breakdown.device}, torch {breakdown.torch}"]
    if breakdown.recompute != "none":
        parts.append(f"recompute={breakdown.recompute}, which the floor does not count")
    if breakdown.states != "float32":
        parts.append(f"optimizer states in {breakdown.states}")
    floor = f"matmuls and attention alone, and the minimum bytes at {breakdown.copy / 1e12:.2f} TB/s"
    return f"{', '.join(parts)}. The floor: {floor}."


def _row(name: str, seconds: float, floor: float, y: float, scale: float, *, weight: int = 400) -> Iterator[str]:
    middle = y + ROW / 2
    yield _text(LEFT - 14, middle + 4.5, name, 13, anchor="end", weight=weight)
    if scale:
        top = middle - (THICK + 1 + THIN) / 2
        yield _bar(LEFT, top, seconds * scale, THICK, "measured")
        yield _bar(LEFT, top + THICK + 1, floor * scale, THIN, "floor")
    texts = (_ms(seconds), _ms(floor) if floor else "–", _format_excess(seconds - floor))
    for column, text in zip(COLUMNS, texts, strict=True):
        css_class = "more" if text.startswith("+") else "ink"
        yield _text(COLUMNS[column], middle + 4.5, text, 13, css_class=css_class, anchor="end", weight=weight)


def _bar(x: float, y: float, width: float, height: float, css_class: str) -> str:
    # However short, a bar stays visible.
    shown = max(width, 0.8) if width else 0.0
    return f'<rect class="{css_class}" x="{x:g}" y="{y:g}" width="{shown:.2f}" height="{height:g}" rx="1.5"/>'


def _text(
    x: float, y: float, text: str, size: float, *, css_class: str = "ink", weight: int = 400, anchor: str = "start"
) -> str:
    return svg_writer.text(x, y, text, size, css_class=css_class, weight=weight, anchor=anchor)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _format_excess(seconds: float) -> str:
    text = f"{seconds * 1e3:+,.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")
