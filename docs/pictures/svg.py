"""A small SVG writer, so that all drawn pictures share their fonts, colours and margins."""

from __future__ import annotations

from html import escape

WIDTH = 800
SANS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"

INK, FAINT, LINE, PAPER = "#24292f", "#6e7781", "#c3cad2", "#fbfcfd"
BLUE, GREEN, ORANGE, VIOLET, RED = "#4f8fd9", "#4fae72", "#e59a43", "#9a7bd0", "#cf5850"
PALE = {BLUE: "#dbe9f9", GREEN: "#dcf1e3", ORANGE: "#fbebd6", VIOLET: "#e9e2f7", RED: "#f9dedc", FAINT: "#eceff2"}


class Canvas:
    """800 pixels wide, light background. Coordinates are pixels from the upper left corner."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []
        self.text(24, 34, title, size=17, weight="bold")

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = PAPER, stroke: str = LINE, *, dash: bool = False
    ) -> None:
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="3"'
        self.parts.append(f'{shape} fill="{fill}" stroke="{stroke}"{dashes}/>')

    def box(
        self, x: float, y: float, w: float, h: float, label: str = "", colour: str = BLUE, *, size: int = 13
    ) -> None:
        """A pale box with a label in its middle; the label may have several lines."""
        self.rect(x, y, w, h, PALE[colour], colour)
        lines = label.split("\n") if label else []
        first = y + h / 2 + size * 0.35 - (len(lines) - 1) * size * 0.6
        for number, line in enumerate(lines):
            self.text(x + w / 2, first + number * size * 1.2, line, size=size, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        colour: str = INK,
        anchor: str = "start",
        weight: str = "normal",
        mono: bool = False,
    ) -> None:
        look = f'font-family="{MONO if mono else SANS}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" xml:space="preserve" {look}>{escape(text)}</text>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        colour: str = FAINT,
        *,
        arrow: bool = False,
        dash: bool = False,
    ) -> None:
        extra = f' marker-end="url(#tip-{colour[1:]})"' if arrow else ""
        extra += ' stroke-dasharray="4 3"' if dash else ""
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {place} stroke="{colour}" stroke-width="1.5"{extra}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = FAINT) -> None:
        self.line(x1, y1, x2, y2, colour, arrow=True)

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Words with their colours, on one line."""
        for word, colour in entries.items():
            self.rect(x, y - 10, 12, 12, PALE[colour], colour)
            self.text(x + 18, y, word, size=12, colour=FAINT)
            x += 38 + 6.4 * len(word)

    def finish(self) -> str:
        tips = "".join(
            f'<marker id="tip-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
            for colour in (INK, FAINT, BLUE, GREEN, ORANGE, VIOLET, RED)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img"><title>{escape(self.title)}</title><defs>{tips}</defs>'
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" fill="{PAPER}" '
            f'stroke="{LINE}"/>'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])
