"""Drawings of MoE layers: token dispatch, the ranks of experts, and measured losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gates
import torch
from svg import BLUE, FAINT, GREEN, INK, LINE, ORANGE, PALE, RED, VIOLET, Canvas

from echelon.layout import Layout, Mesh
from echelon.moe.routing import token_choice_routing
from echelon.moe.token_permutation import TokenPermutation

EXPERTS = {0: BLUE, 1: GREEN, 2: ORANGE, 3: VIOLET}
CHOICES = (((0, 2), (3, 1), (2, 0), (2, 3)), ((2, 1), (2, 0), (1, 3), (0, 2)))
"""two experts of each of four tokens, on two ranks"""
BAND, TOP, SIDE = 150.0, 92.0, 22.0


def sent(choices: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """Tokens of each expert, as the layer sorts them."""
    experts = torch.tensor([choices])
    routing = token_choice_routing(experts, torch.ones(experts.shape), torch.zeros(1), len(EXPERTS))
    order = TokenPermutation.from_routing(routing)
    return [run.tolist() for run in order.tokens.split(order.counts.tolist())]


def travel() -> str:
    """Two ranks with two experts each."""
    c = Canvas(452, "An MoE layer on two ranks (dp=2,ep=2): every token to its two experts and back")
    for x, text in (
        (24, "tokens"),
        (66, "gate"),
        (136, "by expert"),
        (262, "all-to-all"),
        (356, "experts and what they get"),
        (568, "all-to-all"),
        (664, "weighted sums"),
    ):
        c.text(x, 66, text, size=12, colour=FAINT)
    lines = [sent(choices) for choices in CHOICES]
    for rank, choices in enumerate(CHOICES):
        top = TOP + rank * (BAND + 22)
        c.rect(14, top - 14, 772, BAND + 4, "#ffffff", LINE)
        c.text(776, top + 2, f"rank {rank}", size=12, anchor="end", colour=FAINT)
        c.box(66, top, 42, 4 * 30 - 6, "gate", RED, size=12)
        c.box(645, top, 14, 4 * 30 - 6, colour=RED)
        for token in range(len(choices)):
            y = top + token * 30
            c.box(24, y, SIDE, SIDE, _name(rank, token), FAINT, size=12)
            c.line(24 + SIDE, y + SIDE / 2, 65, y + SIDE / 2)
        for expert, colour in EXPERTS.items():
            y = top + expert * 30
            for place, token in enumerate(lines[rank][expert]):
                c.box(128 + place * (SIDE + 3), y, SIDE, SIDE, _name(rank, token), colour, size=12)
        for token, chosen in enumerate(choices):
            y = top + token * 30
            for place, expert in enumerate(chosen):
                c.box(668 + place * 40, y, SIDE, SIDE, _name(rank, token), EXPERTS[expert], size=12)
            c.text(699, y + 16, "+", size=13, anchor="middle", colour=FAINT)
    for expert, colour in EXPERTS.items():
        y = TOP + (expert // 2) * (BAND + 22) + (expert % 2) * 62
        c.rect(348, y - 4, 214, 56, PALE[colour], colour)
        c.text(356, y + 12, f"expert {expert}", size=12)
        arrived = [_name(rank, token) for rank in range(2) for token in lines[rank][expert]]
        for place, name in enumerate(arrived):
            c.rect(356 + place * (SIDE + 3), y + 22, SIDE, SIDE, "#ffffff", colour)
            c.text(356 + place * (SIDE + 3) + SIDE / 2, y + 38, name, size=12, anchor="middle")
        for rank in range(2):
            middle = TOP + rank * (BAND + 22) + expert * 30 + SIDE / 2
            c.arrow(128 + len(lines[rank][expert]) * (SIDE + 3) + 4, middle, 345, y + 14 + rank * 20, colour)
            c.arrow(563, y + 14 + rank * 20, 643, middle, colour)
    rows = [sum(len(lines[rank][expert]) for rank in range(2) for expert in (2 * to, 2 * to + 1)) for to in range(2)]
    c.text(24, 424, f"Rank 0 receives {rows[0]} tokens, rank 1 receives {rows[1]}: the gate decides.", colour=FAINT)
    c.text(24, 442, "Ranks tell each other the numbers first. In backward, gradients go the same ways.", colour=FAINT)
    return c.finish()


def _name(rank: int, token: int) -> str:
    return "abcdefgh"[rank * 4 + token]


def fold() -> str:
    """The same ranks twice: as the rest of the model has them, and as experts do."""
    layout, experts = Layout.parse("dp=4,tp=2,ep=2,etp=2"), 8
    laid = Mesh(layout)
    at = [laid.coordinates(rank) for rank in range(laid.world)]
    c = Canvas(424, f'The ranks of "{layout}": once for the model, once for its {experts} experts')
    c.text(24, 60, "attention, norms, embedding, shared expert: dp 4 x tp 2", size=12, colour=FAINT)
    c.text(24, 202, "experts: 2 copies (edp) of ep 2 x etp 2", size=12, colour=FAINT)
    for rank in range(laid.world):
        x = 24 + rank * 95
        c.box(x, 76, 84, 58, f"rank {rank}\ntp {at[rank]['tp']}", BLUE)
        here = at[rank]
        first = here["ep"] * experts // layout.ep
        halves = f"part {here['etp']} of each"
        label = f"rank {rank}\n{first} to {first + experts // layout.ep - 1}\n{halves}"
        c.box(x, 220, 84, 70, label, (ORANGE, VIOLET)[here["ep"]], size=12)
    for group, ranks in enumerate(laid.groups("tp")):
        _under(c, ranks, 138, f"dp {group}: sequences of its own")
    for copy, ranks in enumerate(laid.groups(("ep", "etp"))):
        _under(c, ranks, 294, f"copy {copy}: tokens of these four ranks travel among them")
    groups = {
        "ep*etp": (laid.groups(("ep", "etp")), "tokens travel"),
        "edp": (laid.groups("edp"), "gradients of experts are summed, ZeRO divides"),
    }
    for row, (name, (found, what)) in enumerate(groups.items()):
        shown = "  ".join(str(list(group)) for group in found)
        c.text(24, 352 + row * 19, f"{name:<7} {shown:<36} {what}", size=12, mono=True)
    c.text(24, 406, "A part of an expert is on 2 of the 8 ranks, a part of any other matrix on 4.", colour=FAINT)
    return c.finish()


def _under(c: Canvas, ranks: Sequence[int], y: float, text: str) -> None:
    left, right = 24 + ranks[0] * 95, 24 + ranks[-1] * 95 + 84
    c.line(left, y + 4, right, y + 4, FAINT)
    c.text((left + right) / 2, y + 20, text, size=12, anchor="middle", colour=FAINT)


# -- measured ---------------------------------------------------------------------------------------------------------

COLOURS = {"dense": INK, "mixture": BLUE, "unbalanced": RED, "loss-free": GREEN, "shared": VIOLET}
PANELS, WIDE, UPPER, HIGH = (60.0, 316.0, 572.0), 196.0, 92.0, 230.0
BEFORE = 0.1
"""share of the steps at the start that the scales of losses leave out"""


def curves() -> str:
    """Loss, loss to the dense model's, and entropy over steps, means over seeds."""
    found = gates.measured()
    names = [name for name in found["models"] if any(run["model"] == name for run in found["runs"])]
    seeds = len({run["seed"] for run in found["runs"]})
    where = f"an {found['device'].removeprefix('NVIDIA ')}" if found["device"] != "cpu" else "one core"
    size = f"width {found['width']}, {found['layers']} layers"
    c = Canvas(410, f"{size}: {found['steps']:,} steps of {found['batch']} x {found['seq_len']} bytes on {where}")
    losses = {name: _mean(found, name, "loss") for name in names}
    dense = losses["dense"]
    shown = {
        ("training loss", f"means of {found['every']} steps and {seeds} seed{'s' * (seeds > 1)}"): losses,
        ("minus the dense model's", "on the same batches"): {
            name: [mine - theirs for mine, theirs in zip(line, dense, strict=True)] for name, line in losses.items()
        },
        ("entropy of the load", "1 is even; mean over layers"): {
            name: _mean(found, name, "entropy") for name in names if name != "dense"
        },
    }
    for left, ((title, more), lines) in zip(PANELS, shown.items(), strict=True):
        c.text(left, 64, title, size=12)
        c.text(left, 80, more, size=12, colour=FAINT)
        first = 0 if "entropy" in title else int(len(dense) * BEFORE)
        seen = [value for line in lines.values() for value in line[first:]]
        _panel(c, left, lines, (min(seen), max(seen)), found["steps"])
    x = PANELS[0]
    for name in names:
        held = statistics.mean(run["held_out"] for run in found["runs"] if run["model"] == name)
        c.line(x, 368, x + 18, 368, COLOURS[name])
        c.text(x + 24, 372, name, size=12)
        c.text(x + 24, 390, f"held out {held:.3f}", size=12, colour=FAINT)
        x += 145
    return c.finish()


def _mean(found: dict[str, Any], name: str, key: str) -> list[float]:
    """One curve of all seeds."""
    lines = [run[key] for run in found["runs"] if run["model"] == name]
    return [statistics.mean(values) for values in zip(*lines, strict=True)]


def _panel(c: Canvas, left: float, lines: dict[str, list[float]], span: tuple[float, float], steps: int) -> None:
    least, most = span
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if (most - least) / step <= 7)
    low, high = least - step * 0.2, most + step * 0.2

    def y(value: float) -> float:
        return UPPER + HIGH * (high - value) / (high - low)

    for level in range(math.ceil(low / step), math.floor(high / step) + 1):
        c.line(left, y(level * step), left + WIDE, y(level * step), "#d8dee6")
        c.text(left - 8, y(level * step) + 4, f"{level * step:.2f}", size=12, anchor="end", colour=FAINT)
    for part in range(3):
        at = steps * part // 2
        c.text(left + WIDE * part / 2, UPPER + HIGH + 20, f"{at:,}", size=12, anchor="middle", colour=FAINT)
    for name, line in lines.items():
        points = [(left + WIDE * (i + 0.5) / len(line), v) for i, v in enumerate(line)]
        for (x1, v1), (x2, v2) in pairwise(points):
            if all(low <= value <= high for value in (v1, v2)):
                c.line(x1, y(v1), x2, y(v2), COLOURS[name])
