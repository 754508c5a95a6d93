"""The attempts of a run in time, from its log.

`python docs/pictures/attempts.py RUN` writes what the picture needs of a run's log to elastic.json.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from svg import BLUE, FAINT, GREEN, INK, ORANGE, PALE, RED, Canvas

HERE = Path(__file__).parent
LEFT, WIDTH, TOP, HIGH = 40, 720, 118, 40


def attempts(path: Path) -> str:
    log = json.loads(path.read_text(encoding="utf-8"))
    begun, ended = log[0]["time"], _end(log)
    scale = WIDTH / (ended - begun)

    def x(when: float) -> float:
        return LEFT + (when - begun) * scale

    canvas = Canvas(250, "A rank is gone for good: restart, then another layout for the ranks that are left")
    starts = [n for n, record in enumerate(log) if record["kind"] == "start"]
    bounds = [*(log[n] for n in starts), None]
    for (first, after), at in zip(pairwise(bounds), starts, strict=True):
        later = log[at + 1 :] if after is None else log[at + 1 : log.index(after)]
        stops = [record["time"] for record in later if record["kind"] == "diagnosis"]
        stop = stops[0] if stops else ended
        steps = [record for record in later if record["kind"] == "step"]
        kept = int(after["after"]) if after is not None else max(record["step"] for record in steps)
        now = stop - sum(record["seconds"] for record in steps)
        canvas.box(x(first["time"]), TOP, x(now) - x(first["time"]), HIGH, "", BLUE)
        for record in steps:
            colour = GREEN if record["step"] <= kept else RED
            canvas.rect(x(now), TOP, record["seconds"] * scale, HIGH, PALE[colour], colour)
            now += record["seconds"]
        side, anchor = (x(first["time"]), "start") if after is not None else (LEFT + WIDTH, "end")
        canvas.text(side, TOP + HIGH + 18, f"{len(steps)} steps", size=12, colour=FAINT, anchor=anchor)
        canvas.text(side, TOP + HIGH + 34, _layout(log, at), size=11, mono=True, anchor=anchor)
        if after is not None:
            canvas.box(x(stop), TOP, x(after["time"]) - x(stop), HIGH, "", ORANGE)
    for place, (when, words) in enumerate(_events(log)):
        y = 66 + 20 * place
        canvas.line(x(when), y + 6, x(when), TOP, INK, dash=True)
        canvas.text(x(when) + (6 if place else -6), y + 4, words, size=12, anchor="start" if place else "end")
    for second in range(int(ended - begun) + 1):
        canvas.text(x(begun + second), TOP + HIGH + 56, f"{second} s", size=11, colour=FAINT, anchor="middle")
    canvas.legend(LEFT, 234, {"start-up": BLUE, "steps": GREEN, "lost steps": RED, "no training": ORANGE})
    return canvas.finish()


def _events(log: list[dict[str, Any]]) -> list[tuple[float, str]]:
    words = {
        "restart": "rank {ranks} dies; restart {number} of {of}",
        "replan": "it dies again; replan, reshard, resume",
    }
    return [(r["time"], words[r["kind"]].format(**{**r, "ranks": r["ranks"]})) for r in log if r["kind"] in words]


def _layout(log: list[dict[str, Any]], at: int) -> str:
    """Of the attempt that starts there."""
    changes = [record for record in log if record["kind"] == "replan"]
    before = [record["to"] for record in log[:at] if record["kind"] == "replan"]
    return str(before[-1] if before else changes[0]["from"])


def _end(log: list[dict[str, Any]]) -> float:
    return float(log[0]["time"] + log[-1]["wall_s"])


def facts(run: Path) -> list[dict[str, Any]]:
    """What the picture shows of a run's log."""
    wanted = {
        "start": ("time", "after"),
        "step": ("step", "seconds"),
        "diagnosis": ("time",),
        "restart": ("time", "number", "of", "ranks"),
        "replan": ("time", "from", "to", "ranks"),
    }
    found = []
    for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "end":
            found.append({"kind": "end", "wall_s": record["time"]["wall_s"]})
        elif record["kind"] in wanted:
            found.append({"kind": record["kind"], **{name: record[name] for name in wanted[record["kind"]]}})
            if record["kind"] == "restart":
                found[-1]["ranks"] = record["ranks"][0]
    return found


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(record) for record in facts(Path(sys.argv[1])))
    (HERE / "elastic.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
