"""Drawings of checkpoints: a save beside training, and how often to save."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from goodput_table import LAYOUT
from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas

from echelon.planning import planner
from echelon.planning.explain.failure_cost import DAY, HOUR, predict_goodput, simulate_run

GRID = "#d8dee6"


def beside() -> str:
    c = Canvas(318, "A save beside training (a drawing, not a measurement)")
    rows = {"training": 84, "copy": 138, "write": 176, "check sums": 214, "agree": 252}
    for word, top in rows.items():
        c.text(24, top + 19, word, size=12, weight="bold")
    c.box(116, 84, 92, 30, "update 100", GREEN, size=11)
    c.box(212, 84, 250, 30, "forward and backward of step 101", BLUE, size=11)
    c.box(466, 84, 92, 30, "update 101", GREEN, size=11)
    c.box(562, 84, 214, 30, "forward of step 102 …", BLUE, size=11)
    c.box(212, 138, 84, 28, "to host", ORANGE, size=11)
    c.line(296, 152, 464, 116, RED, dash=True, arrow=True)
    c.text(474, 148, "the update waits for the copy,", size=11, colour=RED)
    c.text(474, 162, "should it still be under way", size=11, colour=RED)
    c.box(298, 176, 290, 28, "every rank its own file, past the cache", VIOLET, size=11)
    c.box(298, 214, 250, 28, "of words by their place", VIOLET, size=11)
    c.box(592, 252, 74, 28, "index", FAINT, size=11)
    c.box(670, 252, 106, 28, "rename: exists", GREEN, size=11)
    c.line(210, 72, 210, 290, INK, dash=True)
    c.text(206, 304, "save of step 100", size=11, colour=FAINT)
    return c.finish()


def how_often() -> str:
    """Simulated, against the time between checkpoints; what the planner chooses is marked."""
    plan = planner.find_plans("llama-405b", "16384xh100", batch=2048, seq_len=8192, layout=LAYOUT).plans[0]
    chosen = predict_goodput(plan)
    left, top, wide, high = 84.0, 84.0, 640.0, 220.0
    times = [12 * 1.35**n for n in range(18)]
    low, lost = times[0], 0.16
    c = Canvas(372, "What failures cost llama-405b on 16,384 H100, by the time between checkpoints")

    def place(seconds: float, share: float) -> tuple[float, float]:
        across = math.log(seconds / low) / math.log(times[-1] / low)
        return left + wide * across, top + high * min(share / lost, 1.0)

    for level in range(0, 17, 4):
        at = top + high * level / 16
        c.line(left, at, left + wide, at, GRID)
        c.text(left - 8, at + 4, f"{100 - level} %", size=11, anchor="end", colour=FAINT)
    for seconds, word in ((15, "15 s"), (60, "1 min"), (240, "4 min"), (900, "15 min")):
        at, _ = place(seconds, 0)
        c.text(at, top + high + 18, word, size=11, anchor="middle", colour=FAINT)
    waits = replace(chosen.recovery, save=chosen.recovery.exists)
    for recovery, colour, word in (
        (chosen.recovery, BLUE, "written in the background"),
        (waits, ORANGE, "training waits for the write"),
    ):
        points = []
        for seconds in times:
            runs = [simulate_run(chosen.mtbf, recovery, seconds, 54 * DAY, seed).useful for seed in range(10)]
            points.append(place(seconds, 1 - sum(runs) / len(runs)))
        for (x1, y1), (x2, y2) in pairwise(points):
            if max(y1, y2) < top + high:
                c.line(x1, y1, x2, y2, colour)
        middle = points[10 if recovery is waits else 9]
        c.text(middle[0], middle[1] + (46 if recovery is waits else -8), word, size=12, colour=colour)
    x, y = place(chosen.checkpoint_seconds, 1 - chosen.shares.useful)
    c.rect(x - 4, y - 4, 8, 8, RED, RED)
    c.text(
        x + 10, y - 10, f"chosen: {chosen.checkpoint_seconds:.0f} s, {chosen.shares.useful:.1%}", size=12, colour=RED
    )
    words = (
        f"A failure every {chosen.mtbf / HOUR:.1f} h (Llama 3's rate); {chosen.recovery.down:.0f} s until training "
        "continues after one. 54 days, simulated 10 times."
    )
    c.text(24, 352, words, size=12, colour=FAINT)
    return c.finish()
