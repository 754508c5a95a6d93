"""Lines that were measured: loss over steps in several precisions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from svg import BLUE, FAINT, INK, ORANGE, RED, VIOLET, Canvas

COLOURS = {"bf16 plain": INK, "bf16": BLUE, "bf16 states": VIOLET, "fp8": RED, "fp8-row": ORANGE}
LEFT, TOP, WIDE, HIGH = 70.0, 70.0, 690.0, 240.0
LOW, MOST = 0.7, 2.6


def losses(path: Path) -> str:
    """From a file of losses, each the mean of some steps."""
    found = json.loads(path.read_text(encoding="utf-8"))
    every, curves = found["every"], found["curves"]
    count = max(len(curve["loss"]) for curve in curves.values())
    c = Canvas(400, "The same 600 steps in several precisions (130M Llama, bytes of Python, one H200)")
    c.text(24, 56, f"training loss, means of {every} steps", size=12, colour=FAINT)
    for level in (1.0, 1.5, 2.0, 2.5):
        y = _y(level)
        c.line(LEFT, y, LEFT + WIDE, y, "#d8dee6")
        c.text(LEFT - 8, y + 4, f"{level:g}", size=12, anchor="end", colour=FAINT)
    for step in range(0, count * every + 1, 100):
        c.text(LEFT + WIDE * step / (count * every), TOP + HIGH + 20, str(step), size=12, anchor="middle", colour=FAINT)
    for name, curve in curves.items():
        shown = [(i, loss) for i, loss in enumerate(curve["loss"]) if loss <= MOST]
        points = [(LEFT + WIDE * (i + 0.5) / count, _y(loss)) for i, loss in shown]
        for (x1, y1), (x2, y2) in pairwise(points):
            c.line(x1, y1, x2, y2, COLOURS[name])
    x = LEFT
    for name, curve in curves.items():
        c.line(x, 358, x + 18, 358, COLOURS[name])
        c.text(x + 24, 362, name, size=12)
        c.text(x + 24, 380, f"held out {curve['evaluation']:.3f}", size=12, colour=FAINT)
        x += 140
    return c.finish()


def _y(loss: float) -> float:
    return TOP + HIGH * (MOST - loss) / (MOST - LOW)
