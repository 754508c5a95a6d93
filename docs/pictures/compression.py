"""The saved activations of a convolutional network: which operator reads them, and their measured bytes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import compressed
from svg import BLUE, FAINT, GREEN, INK, ORANGE, VIOLET, Canvas

COLOURS = {"none": FAINT, "lossless": GREEN, "lossless+fp16": BLUE, "lossless+fp8": ORANGE, "lossless+int8": VIOLET}
CHAIN = ("conv", "ReLU", "conv", "ReLU", "max pool", "conv")
KEPT = (
    (1, "read by ReLU and the\nnext convolution:\n1 bit + what is not 0", GREEN),
    (3, "read by ReLU alone:\n1 bit", GREEN),
    (4, "where the maximum was:\n1 byte, not 8", GREEN),
    (5, "dense values:\nfewer bits, if asked", ORANGE),
)


def kept() -> str:
    runs = compressed.runs()
    most = len(runs[0]["rows"])
    c = Canvas(276 + len(runs) * (most * 18 + 34), "Saved activations of forward")
    for number, name in enumerate(CHAIN):
        x = 24 + number * 128
        c.box(x, 56, 96, 34, name, BLUE if name == "conv" else VIOLET, size=13)
        if number + 1 < len(CHAIN):
            c.arrow(x + 98, 73, x + 124, 73, INK)
    for number, words, colour in KEPT:
        x, low = 24 + number * 128 - 22, number % 2 == 0
        c.line(x + 70, 92, x + 70, 120 if not low else 182, FAINT, dash=True)
        c.box(x - 8, 122 if not low else 184, 156, 56, words, colour, size=12)
    top = 282.0
    for run in runs:
        top = _bars(c, run, top)
    return c.finish()


SHOWN, MOST = 30, 7.0
"""steps, and the loss at the top"""


def losses(path: Path) -> str:
    """Of the same steps with each kind, beside none: behind those that are shown all are near 0."""
    found = json.loads(path.read_text(encoding="utf-8"))
    c = Canvas(330, f"The same steps with each kind ({compressed.title(found)})")
    left, top, wide, high = 60.0, 56.0, 700.0, 210.0
    for level in range(0, int(MOST) + 1, 2):
        y = top + high * (1 - level / MOST)
        c.line(left, y, left + wide, y, "#d8dee6")
        c.text(left - 8, y + 4, str(level), size=12, anchor="end", colour=FAINT)
    for step in range(0, SHOWN + 1, 5):
        c.text(left + wide * step / SHOWN, top + high + 20, str(step), size=12, anchor="middle", colour=FAINT)
    x = left
    for kind, curve in found["curves"].items():
        colour = INK if kind == "none" else COLOURS[kind]
        points = [(left + wide * i / SHOWN, top + high * (1 - loss / MOST)) for i, loss in enumerate(curve[:SHOWN])]
        for (x1, y1), (x2, y2) in pairwise(points):
            c.line(x1, y1, x2, y2, colour, dash=kind == "lossless")
        same = ", equal at every step" if kind != "none" and curve == found["curves"]["none"] else ""
        c.line(x, 306, x + 18, 306, colour)
        c.text(x + 24, 310, kind + same, size=12)
        x += 44 + 7 * len(kind + same)
    return c.finish()


def _bars(c: Canvas, run: dict[str, Any], top: float) -> float:
    c.text(24, top, compressed.title(run), weight="bold", size=13)
    whole = run["rows"][0]["bytes"]
    for row in run["rows"]:
        top += 18
        wide = 440 * row["bytes"] / whole
        c.text(24, top, row["compress"], mono=True, size=12)
        c.box(150, top - 11, wide, 13, "", COLOURS[row["compress"]])
        times = f", {whole / row['bytes']:.1f} x smaller" if row["compress"] != "none" else ""
        c.text(158 + wide, top, f"{row['bytes'] / 2**20:.1f} MiB{times}", size=12, colour=FAINT)
    return top + 34
