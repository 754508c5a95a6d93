"""A loss spike that was measured: the run that goes through it, and the run that goes back and skips its batch.

`python docs/pictures/spikes.py` makes both runs and writes their losses, from which the picture is drawn anywhere.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from svg import BLUE, FAINT, GREEN, INK, RED, Canvas

LOSSES = Path(__file__).with_name("losses-spike.json")
AT, STEPS = 57, 90
COMMON = (
    f"train --inject spike:step={AT} --set data.path=numbers.txt --set steps={STEPS} --set batch=8 --set seq_len=64 "
    "--set eval.every=0 --set sample.tokens=0 --set device=cpu --set clip=0 --set optimizer.name=sgd "
    "--set optimizer.lr=0.1 --set optimizer.momentum=0.9 --set optimizer.weight_decay=0"
)
RUNS = {"none": "", "rollback": "--set checkpoint.every=10 --set spike.action=rollback"}
LEFT, TOP, WIDE, HIGH = 70.0, 76.0, 690.0, 230.0
FIRST, LOW, MOST = 40, 2.0, 12.5


def losses() -> str:
    """Both runs, and what the second did twice."""
    found: dict[str, list[tuple[int, float]]] = json.loads(LOSSES.read_text(encoding="utf-8"))
    c = Canvas(392, "One batch of noise: a run that goes through it, and one that goes back and skips it")
    c.text(
        24, 58, "training loss of each step (llama-tiny, numbers in order, SGD with momentum)", size=12, colour=FAINT
    )
    for level in (2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0):
        c.line(LEFT, _y(level), LEFT + WIDE, _y(level), "#d8dee6")
        c.text(LEFT - 8, _y(level) + 4, f"{level:g}", size=12, anchor="end", colour=FAINT)
    for step in range(FIRST, STEPS + 1, 10):
        c.text(_x(step), TOP + HIGH + 20, str(step), size=12, anchor="middle", colour=FAINT)
    c.text(LEFT + WIDE, TOP + HIGH + 38, "step", size=12, anchor="end", colour=FAINT)
    through, back = found["none"], found["rollback"]
    turn = next(place for place, (one, two) in enumerate(pairwise(back)) if two[0] <= one[0])
    _curve(c, through, RED)
    _curve(c, back[: turn + 1], INK)
    _curve(c, back[turn + 1 :], GREEN)
    peak, checkpoint = back[turn], back[turn + 1][0] - 1
    place = next(loss for step, loss in back if step == checkpoint)
    c.line(_x(checkpoint), _y(peak[1]), _x(peak[0]), _y(peak[1]), BLUE, dash=True)
    c.arrow(_x(checkpoint), _y(peak[1]), _x(checkpoint), _y(place) - 6, BLUE)
    c.text(_x(checkpoint) - 8, _y(peak[1]) + 18, f"back to step {checkpoint}", size=12, anchor="end", colour=BLUE)
    c.text(_x(peak[0]) + 14, _y(peak[1]) + 18, f"batch {AT} is noise: loss {peak[1]:.1f}", size=12)
    ends = {name: sum(loss for _, loss in curve[-10:]) / 10 for name, curve in found.items()}
    words = (
        (RED, f"spike.action=none: mean of the last ten {ends['none']:.2f}"),
        (GREEN, f"spike.action=rollback: {ends['rollback']:.2f}"),
    )
    x = LEFT
    for colour, word in words:
        c.line(x, 372, x + 18, 372, colour)
        c.text(x + 24, 376, word, size=12)
        x += 360
    return c.finish()


def _curve(c: Canvas, points: list[tuple[int, float]], colour: str) -> None:
    shown = [(step, loss) for step, loss in points if step >= FIRST]
    for (step, loss), (then, after) in pairwise(shown):
        c.line(_x(step), _y(loss), _x(then), _y(after), colour)


def _x(step: int) -> float:
    return LEFT + WIDE * (step - FIRST) / (STEPS - FIRST)


def _y(loss: float) -> float:
    return TOP + HIGH * math.log(MOST / loss) / math.log(MOST / LOW)


def measure() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "numbers.txt").write_text("".join(f"{number}\n" for number in range(1, 30001)))
        for name, more in RUNS.items():
            command = shlex.split(f"-m echelon {COMMON} {more} --set run={name}")
            subprocess.run([sys.executable, *command], cwd=folder, check=True)
            lines = Path(folder, name, "log.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
            found[name] = [(record["step"], round(record["loss"], 4)) for record in steps]
    LOSSES.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure()
