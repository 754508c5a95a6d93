"""SVG documents and their elements: one file, no fonts or scripts from elsewhere.

The reader's fonts are unknown, so `text_width` assumes wide letters. Elements take a CSS class, whose colour may follow
the reader's light or dark mode, or a fixed fill.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
LETTER_WIDTH = 0.6
"""the width of a letter, as a share of the font size"""
WHITE = 'fill="#ffffff"'
PAPER = 'class="paper"'

LIGHT_THEME = {"paper": "#ffffff", "ink": "#1c2230", "pale": "#5a6376", "line": "#d5dae3"}
DARK_THEME = {"paper": "#11151c", "ink": "#e8ebf1", "pale": "#9aa4b5", "line": "#333b49"}


def document(
    elements: Iterable[str], width: float, height: float, *, title: str, style: str, background: str = PAPER
) -> str:
    """The text of an SVG file."""
    return (
        f'{_opening(width, height)} font-family="{FONT}" role="img">\n<title>{escape(title)}</title>\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" {background}/>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


def stretched(elements: Iterable[str], width: float, height: float, *, title: str) -> str:
    """An SVG inside a page that fills its box; the page's CSS classes colour it."""
    opening = f'<svg viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none" role="img">'
    return f"{opening}<title>{escape(title)}</title>{''.join(elements)}</svg>"


def _opening(width: float, height: float) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}'


def stack(upper: str, lower: str) -> str:
    """One SVG with two others, one below the other."""
    sizes = [re.search(r'width="(\d+)" height="(\d+)"', text) for text in (upper, lower)]
    (width, height), (other_width, other_height) = ((int(size[1]), int(size[2])) for size in sizes if size)
    moved = lower.replace("<svg ", f'<svg y="{height}" ', 1)
    opening = _opening(max(width, other_width), height + other_height)
    return f'{opening} role="img">\n<rect width="100%" height="100%" {WHITE}/>\n{upper}{moved}</svg>\n'


def text(
    x: float,
    y: float,
    content: str,
    size: float,
    *,
    css_class: str = "",
    fill: str = "",
    weight: int = 400,
    anchor: str = "start",
    baseline: str = "",
) -> str:
    """A line of text; `anchor` is the part of it that lies at x: start, middle or end."""
    first = f'class="{css_class}" ' if css_class else ""
    more = f' fill="{fill}"' if fill else ""
    more += f' font-weight="{weight}"' if weight != 400 else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' dominant-baseline="{baseline}"' if baseline else ""
    return f'<text {first}x="{x:g}" y="{y:g}" font-size="{size:g}"{more}>{escape(content)}</text>'


def text_width(content: str, size: float) -> float:
    return size * LETTER_WIDTH * len(content)


def fill_classes(colours: Mapping[str, str]) -> str:
    """CSS that gives each class its fill colour."""
    return "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())


def in_dark_mode(style: str) -> str:
    """CSS that holds in the reader's dark mode alone."""
    return f"@media (prefers-color-scheme: dark){{{style}}}"
