"""One model's memory as bars, one technique on top of the other."""

from __future__ import annotations

import saved_memory
from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas

COLOURS = {
    "parameters": BLUE,
    "master": VIOLET,
    "moments": RED,
    "gradients": ORANGE,
    saved_memory.REST: GREEN,
}
LEFT, WIDE, ROW = 250, 420, 34


def stacked() -> str:
    found = saved_memory.run("stack")
    rows = found["stack"]
    c = Canvas(112 + ROW * len(rows), f"The fullest moment of a step: {saved_memory.title(found)}")
    c.legend(24, 62, COLOURS)
    most = max(row["peak"] for row in rows) / saved_memory.GIB
    first = rows[0]["seconds"]
    for number, row in enumerate(rows):
        x, y = float(LEFT), 82 + ROW * number
        c.text(24, y + 16, row["name"], size=12)
        for name, gib in saved_memory.shares(row).items():
            wide = WIDE * gib / most
            if wide >= 0.5:
                c.box(x, y, wide, ROW - 12, f"{gib:.0f}" if wide > 18 else "", COLOURS[name], size=11)
            x += wide
        told = f"{row['peak'] / saved_memory.GIB:.1f} GiB, {row['seconds'] / first:.2f} x the time"
        beside = x + 8 if x < 640 else x - 8
        outside = beside > x
        c.text(beside, y + 16, told, size=12, colour=FAINT if outside else INK, anchor="start" if outside else "end")
    return c.finish()
