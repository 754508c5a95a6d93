"""Where the time of a step goes, as SVG: for each part what was measured over its floor, with the numbers beside them.

Made from a file of profiles alone, without a device. One file, no fonts or scripts from elsewhere; the colours follow
the reader's light or dark mode.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from echelon.bench.profile.breakdown import Breakdown

WIDTH, MARGIN = 900, 24
LEFT, BARS = 164, 440
"""where bars begin, and how long the longest is"""
COLUMNS = {"measured": 704, "floor": 784, "above it": 876}
"""where numbers end"""
ROW, THICK, THIN = 30, 12, 6
LETTER_WIDTH = 0.6
"""the room of a letter, as a share of the size of the text: the fonts of the reader are unknown"""
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
LIGHT = {"paper": "#ffffff", "ink": "#1c2230", "pale": "#5a6376", "line": "#d5dae3"}
LIGHT |= {"measured": "#1f5fa8", "floor": "#3fa796", "more": "#b3440f"}
DARK = {"paper": "#11151c", "ink": "#e8ebf1", "pale": "#9aa4b5", "line": "#333b49"}
DARK |= {"measured": "#5b9ce0", "floor": "#2f8576", "more": "#f08a52"}


def as_svg(found: Sequence[Breakdown]) -> str:
    """The picture as the text of an SVG file, one profile below the other."""
    parts: list[str] = []
    y = 8.0
    for one in found:
        more, y = _panel(one, y)
        parts += more
    height = y + 16
    title = escape("; ".join(_title(one) for one in found))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}" role="img">\n<title>{title}</title>\n'
        f"<style>{_style(LIGHT)}@media (prefers-color-scheme: dark){{{_style(DARK)}}}"
        "text{font-variant-numeric:tabular-nums}</style>\n"
        '<rect width="100%" height="100%" class="paper"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _style(colours: dict[str, str]) -> str:
    return "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())


def _title(found: Breakdown) -> str:
    return f"{found.shape} in {found.precision}: a step of {_ms(found.total)} ms over a floor of {_ms(found.floor)} ms"


def _panel(found: Breakdown, y: float) -> tuple[list[str], float]:
    """A profile from `y` on, and where it ends."""
    parts = [_text(MARGIN, y + 28, _title(found), 19, weight=650)]
    y += 28
    for line in textwrap.wrap(_subtitle(found), int((WIDTH - 2 * MARGIN) / (13 * LETTER_WIDTH))):
        y += 20
        parts.append(_text(MARGIN, y, line, 13, look="pale"))
    y += 30
    x = float(LEFT)
    for name, thick in (("measured", THICK), ("floor", THIN)):
        parts.append(_bar(x, y - 4 - thick / 2, 14, thick, name))
        parts.append(_text(x + 20, y, name, 12, look="pale"))
        x += 100
    parts += [_text(at, y, f"{name}, ms", 12, look="pale", anchor="end") for name, at in COLUMNS.items()]
    y += 10
    longest = max(max(part.seconds, part.floor_s) for part in found.parts)
    for part in found.parts:
        parts += _row(part.name, part.seconds, part.floor_s, y, BARS / longest if longest else 0.0)
        y += ROW
    parts.append(f'<rect class="line" x="{MARGIN}" y="{y + 2:g}" width="{WIDTH - 2 * MARGIN}" height="1"/>')
    parts += _row("together", found.total, found.floor, y + 4, 0.0, weight=650)
    return parts, y + ROW + 16


def _subtitle(found: Breakdown) -> str:
    words = [f"{found.seq:,} x {found.batch} tokens on {found.device}, torch {found.torch}"]
    if found.recompute != "none":
        words.append(f"recompute={found.recompute}, which the floor does not count")
    if found.states != "float32":
        words.append(f"optimizer states in {found.states}")
    kept = f"products and attention alone, and the fewest bytes at {found.copy / 1e12:.2f} TB/s"
    return f"{', '.join(words)}. The floor: {kept}."


def _row(name: str, seconds: float, floor: float, y: float, scale: float, *, weight: int = 400) -> Iterator[str]:
    middle = y + ROW / 2
    yield _text(LEFT - 14, middle + 4.5, name, 13, anchor="end", weight=weight)
    if scale:
        top = middle - (THICK + 1 + THIN) / 2
        yield _bar(LEFT, top, seconds * scale, THICK, "measured")
        yield _bar(LEFT, top + THICK + 1, floor * scale, THIN, "floor")
    numbers = {
        "measured": _ms(seconds),
        "floor": _ms(floor) if floor else "–",
        "above it": _format_excess(seconds - floor),
    }
    for column, text in numbers.items():
        look = "more" if text.startswith("+") else "ink"
        yield _text(COLUMNS[column], middle + 4.5, text, 13, look=look, anchor="end", weight=weight)


def _bar(x: float, y: float, width: float, height: float, look: str) -> str:
    # What is there is seen, however short.
    shown = max(width, 0.8) if width else 0.0
    return f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{shown:.2f}" height="{height:g}" rx="1.5"/>'


def _text(
    x: float, y: float, text: str, size: float, *, look: str = "ink", weight: int = 400, anchor: str = "start"
) -> str:
    more = f' font-weight="{weight}"' if weight != 400 else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text class="{look}" x="{x:g}" y="{y:g}" font-size="{size:g}"{more}>{escape(text)}</text>'


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _format_excess(seconds: float) -> str:
    text = f"{seconds * 1e3:+,.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")
