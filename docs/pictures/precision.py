"""The dtypes of a step, and how a loss scale changes."""

from __future__ import annotations

import math

import torch
from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas

from echelon.precision.loss_scale import GROWTH_INTERVAL as EVERY_OF_A_RUN
from echelon.precision.loss_scale import LossScale, LossScaler

CHAIN = (
    ("weights", "dtype", BLUE),
    ("forward,\nbackward", "dtype; matmuls\naccumulate in float32", BLUE),
    ("sum over\nmicrobatches\nand ranks", "precision.reduce", ORANGE),
    ("norm, loss,\ncounts", "float64", VIOLET),
    ("update", "precision.master,\noptimizer.states", GREEN),
)
STEPS, EVERY, BAD = 48, 12, (7, 9, 30)


def types() -> str:
    c = Canvas(384, "The dtypes of a step")
    for number, (name, kind, colour) in enumerate(CHAIN):
        x = 24 + number * 154
        c.box(x, 56, 126, 62, name, colour)
        for line, word in enumerate(kind.split("\n")):
            c.text(x + 63, 138 + 15 * line, word, size=12, colour=FAINT, anchor="middle")
        if number + 1 < len(CHAIN):
            c.arrow(x + 128, 87, x + 152, 87, INK)
    c.line(703, 168, 703, 184)
    c.line(703, 184, 87, 184)
    c.arrow(87, 184, 87, 146)
    c.text(
        395,
        200,
        "rounded to dtype; without master weights, stochastically",
        size=12,
        colour=FAINT,
        anchor="middle",
    )
    _scale(c, 232)
    return c.finish()


def _scale(c: Canvas, top: float) -> None:
    """Of a run with gradients that are not finite in some of its steps."""
    scaling = LossScaler(LossScale.dynamic(every=EVERY), torch.device("cpu"))
    c.text(
        24,
        top,
        f"The loss scale, doubled after {EVERY} good steps in a row (in a run, {EVERY_OF_A_RUN:,})",
        weight="bold",
    )
    left, wide, low, step = 96, 14.0, top + 110, 34.0
    values = []
    for number in range(STEPS):
        values.append(float(scaling.scale))
        good = torch.tensor(number not in BAD)
        scaling.update(good, good)
    least = min(math.log2(value) for value in values)
    for level in sorted(set(values)):
        y = low - step * (math.log2(level) - least)
        c.text(left - 10, y + 4, f"{level:,.0f}", size=12, colour=FAINT, anchor="end")
    for number, value in enumerate(values):
        x, y = left + wide * number, low - step * (math.log2(value) - least)
        c.line(x, y, x + wide, y, BLUE)
        if number + 1 < STEPS and values[number + 1] != value:
            c.line(x + wide, y, x + wide, low - step * (math.log2(values[number + 1]) - least), BLUE)
        if number in BAD:
            c.text(x + wide / 2, y - 6, "x", colour=RED, weight="bold", anchor="middle")
    c.text(
        left,
        low + 24,
        "x  a gradient is not finite: no rank updates, and the scale halves everywhere",
        size=12,
        colour=FAINT,
    )
