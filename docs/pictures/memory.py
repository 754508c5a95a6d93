"""One model's memory as bars, one technique on top of the other."""

from __future__ import annotations

import saved_memory
from svg import BLUE, GREEN, INK, ORANGE, RED, VIOLET, Canvas

COLOURS = {"parameters": BLUE, "master": VIOLET, "moments": RED, "gradients": ORANGE, "activations": GREEN}
LEFT, WIDE, ROW = 220, 470, 34


def stacked() -> str:
    found = saved_memory.rows(saved_memory.STACKED)
    title = f"The fullest moment of a step: {saved_memory.STACKED}, 4 sequences of 4,096 tokens, one H200"
    c = Canvas(112 + ROW * len(found), title)
    c.legend(24, 62, COLOURS)
    c.line(470, 50, 470, 66, INK)
    c.text(478, 62, "measured (the parts are the planner's)", size=12)
    most = max(row.peak for row in found)
    for number, row in enumerate(found):
        x, y = float(LEFT), 82 + ROW * number
        c.text(24, y + 16, row.name, size=12)
        for name, gib in row.planned.items():
            wide = WIDE * gib / most
            if wide >= 0.5:
                c.box(x, y, wide, ROW - 12, f"{gib:.0f}" if wide > 18 else "", COLOURS[name], size=11)
            x += wide
        at = LEFT + WIDE * row.peak / most
        c.line(at, y - 4, at, y + ROW - 8, INK)
        c.text(at + 8, y + 16, f"{row.peak:.1f} GiB", size=12)
    return c.finish()
