"""Drawings of splits: ranks of a layout, parameter groups, ZeRO stages, tensor and sequence parallelism."""

from __future__ import annotations

import math

from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas
from tables import SIZES_OF, states

from echelon.layout import Layout, Mesh
from echelon.layout.placement import LogicalParam, ParamGroupSpec

STATES = {"parameters": BLUE, "master": VIOLET, "gradients": GREEN, "optimizer": ORANGE}


def mesh() -> str:
    layout = Layout.parse("dp=4,shard=2,tp=2")
    laid = Mesh(layout)
    c = Canvas(330, f'The ranks of "{layout}"')
    c.text(
        24,
        56,
        "8 ranks = dp 4 x tp 2. dp = 2 replicas of 2 shards. tp is innermost: neighbours talk most.",
        colour=FAINT,
    )
    for replica in range(2):
        left = 24 + replica * 382
        c.rect(left, 76, 370, 176)
        c.text(left + 12, 98, f"replica {replica}", colour=FAINT)
        for shard in range(2):
            inner = left + 12 + shard * 178
            c.box(inner, 110, 168, 130, colour=GREEN)
            c.text(inner + 10, 130, f"shard {shard}", colour=FAINT)
    for rank in range(laid.world):
        at = laid.coordinates(rank)
        x = 24 + at["replica"] * 382 + 12 + at["shard"] * 178 + 12 + at["tp"] * 74
        c.box(x, 142, 68, 84, f"rank {rank}\ntp {at['tp']}", BLUE)
    groups = {name: laid.groups(name) for name in ("tp", "shard", "replica")}
    for row, (name, found) in enumerate(groups.items()):
        shown = "  ".join(str(list(group)) for group in found)
        c.text(24, 276 + row * 19, f"{name:<8} {shown}", size=12, mono=True)
    return c.finish()


def flat_units() -> str:
    entries = (
        LogicalParam(name="q.weight", names=("q.weight",), shape=(6, 4)),
        LogicalParam(name="k.weight", names=("k.weight",), shape=(3, 4)),
        LogicalParam(name="norm.weight", names=("norm.weight",), shape=(4,), decay=False),
    )
    unit = ParamGroupSpec(name="block", params=entries, num_shards=3)
    colours = {"q.weight": BLUE, "k.weight": GREEN, "norm.weight": ORANGE}
    c = Canvas(360, "A parameter group: one flat buffer per block, in equal shards")
    scale, left = 742 / (unit.num_shards * unit.shard_numel), 29
    x = left
    for entry in unit.params:
        rows, columns = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
        for row in range(rows):
            for column in range(columns):
                c.rect(x + column * 15, 74 + row * 15, 15, 15, "#ffffff", colours[entry.name])
        c.text(x + columns * 15 + 12, 88, entry.name, mono=True, size=12)
        c.text(x + columns * 15 + 12, 105, " x ".join(map(str, entry.shape)), size=12, colour=FAINT)
        start = left + unit.offsets[entry.name] * scale
        c.arrow(x + columns * 7.5, 78 + rows * 15, start + entry.local_numel * scale / 2, 196, colours[entry.name])
        x += 250
    for entry in unit.params:
        start, wide = unit.offsets[entry.name], entry.local_numel
        label = entry.name if wide > 8 else "norm"
        c.box(left + start * scale, 200, wide * scale, 34, label, colours[entry.name], size=12)
    padding = unit.num_shards * unit.shard_numel - unit.numel
    if padding:
        c.box(left + unit.numel * scale, 200, padding * scale, 34, "pad" if padding > 1 else "", FAINT, size=11)
    for shard in range(unit.num_shards):
        start = left + shard * unit.shard_numel * scale
        c.rect(start + 2, 250, unit.shard_numel * scale - 4, 42)
        c.text(start + unit.shard_numel * scale / 2, 268, f"shard {shard}", anchor="middle")
        text = f"elements {shard * unit.shard_numel} to {(shard + 1) * unit.shard_numel - 1}"
        c.text(start + unit.shard_numel * scale / 2, 284, text, size=11, colour=FAINT, anchor="middle")
        if shard:
            c.line(start, 192, start, 300, INK, dash=True)
    c.text(
        24,
        326,
        f"{unit.numel} elements, padded by {padding}. A shard boundary may lie inside a parameter.",
        colour=FAINT,
    )
    c.text(
        24,
        345,
        "All-gather, reduce-scatter and all-reduce move the full buffer: one collective per group.",
        colour=FAINT,
    )
    return c.finish()


def zero_stages() -> str:
    rows = states()
    largest = max(sum(held.values()) for _, held in rows)
    c = Canvas(96 + 52 * len(rows), f"Bytes that a rank holds between steps: {SIZES_OF}")
    c.legend(24, 58, STATES)
    scale = 500 / largest
    for number, (layout, held) in enumerate(rows):
        top = 78 + number * 52
        c.text(24, top + 23, layout, mono=True, size=13)
        x = 190.0
        for name, colour in STATES.items():
            if held[name]:
                wide = held[name] * scale
                c.box(x, top, wide, 36, f"{held[name] / 2**20:.0f}" if wide > 30 else "", colour, size=12)
                x += wide
        c.text(x + 10, top + 23, f"{sum(held.values()) / 2**20:,.0f} MiB", weight="bold")
    return c.finish()


def tensor_region() -> str:
    c = Canvas(372, "One tensor-parallel region: attention on tp=2")
    c.box(24, 150, 66, 64, "x\n(full)", FAINT)
    c.box(122, 96, 62, 172, "enter", VIOLET)
    c.box(604, 96, 62, 172, "leave", VIOLET)
    c.box(698, 150, 78, 64, "y\n(full)", FAINT)
    c.rect(200, 62, 388, 240, dash=True)
    c.text(394, 80, "region: no communication inside", colour=FAINT, anchor="middle", size=12)
    for rank, top in enumerate((90, 196)):
        colour = (BLUE, GREEN)[rank]
        c.text(212, top + 16, f"rank {rank}", size=12, colour=FAINT)
        c.box(212, top + 24, 108, 64, "q, k, v\ncolumns " + ("1st half", "2nd half")[rank], colour, size=12)
        c.box(340, top + 24, 108, 64, "attention\nheads " + ("0, 1", "2, 3")[rank], colour, size=12)
        c.box(468, top + 24, 108, 64, "o\nrows " + ("1st half", "2nd half")[rank], colour, size=12)
        for x in (320, 448):
            c.arrow(x, top + 56, x + 19, top + 56)
        c.arrow(184, top + 56, 211, top + 56)
        c.arrow(576, top + 56, 603, top + 56)
    c.arrow(90, 182, 121, 182)
    c.arrow(666, 182, 697, 182)
    c.text(24, 328, "enter", weight="bold", size=12)
    c.text(
        70,
        328,
        "sp=0: forward nothing, backward all-reduce.   sp=1: forward all-gather, backward reduce-scatter.",
        size=12,
    )
    c.text(24, 350, "leave", weight="bold", size=12)
    c.text(
        70,
        350,
        "sp=0: forward all-reduce, backward nothing.   sp=1: forward reduce-scatter, backward all-gather.",
        size=12,
    )
    return c.finish()


def tensor_grids() -> str:
    """The parts of a matmul's three matrices on one rank of a square and of a cube, and what it receives."""
    c = Canvas(420, "Blocks of Y = X W on a square (tp=4) and on a cube (tp=8): one rank's view")
    c.legend(24, 58, {"its own": BLUE, "comes to it": GREEN, "made for another": ORANGE, "elsewhere": FAINT})
    square = {
        "X": ((2, 2), {(0, 0)}, {(0, 1)}, "sequences y, columns x", "along x, one block after the other"),
        "W": ((2, 2), {(0, 0)}, {(1, 0)}, "in y, out x", "along y, at the same time"),
        "Y": ((2, 2), {(0, 0)}, set(), "sequences y, columns x", "a sum of two matmuls"),
    }
    cube = {
        "X": ((4, 2), {(0, 0)}, {(1, 0)}, "sequences z y, columns x", "gathered along y"),
        "W": ((2, 4), {(0, 0)}, {(0, 1)}, "in x, out y and again z", "gathered along z"),
        "Y": ((4, 2), {(0, 0)}, {(1, 0)}, "sequences z x, columns y", "summed and scattered along x"),
    }
    for top, kind, matrices in ((88, "2d", square), (250, "3d", cube)):
        c.text(24, top + 60, kind, weight="bold", size=17)
        for number, (name, (shape, own, coming, lies, moved)) in enumerate(matrices.items()):
            left = 84 + number * 246
            for row in range(shape[0]):
                for column in range(shape[1]):
                    place = (row, column)
                    other = ORANGE if name == "Y" else GREEN
                    colour = BLUE if place in own else other if place in coming else FAINT
                    wide, high = 128 / shape[1], 96 / shape[0]
                    c.box(left + column * wide, top + row * high, wide - 3, high - 3, "", colour)
            c.text(left - 18, top + 52, name, weight="bold")
            c.text(left, top + 114, lies, size=12)
            c.text(left, top + 131, moved, size=12, colour=FAINT)
    c.text(
        24, 408, "On layers of squares (2.5d) each layer has other sequences, and a copy of W.", size=12, colour=FAINT
    )
    return c.finish()


def sequence_slices() -> str:
    length, tp = 33, 2
    part = math.ceil(length / tp)
    c = Canvas(322, f"Sequence parallelism: {length} positions on tp={tp}, slices of {part}")
    cell = 6.4
    whole, piece = length * cell, part * cell
    places = {24: ("norm, residual", "a slice per rank"), 566: ("dropout, residual", "a slice per rank")}
    places[276] = ("attention or MLP", "all positions, own heads or columns")
    for x, (title, what) in places.items():
        c.text(x, 68, title, weight="bold")
        c.text(x, 86, what, size=12, colour=FAINT)
    for rank, top in enumerate((106, 182)):
        colour = (BLUE, GREEN)[rank]
        first, last = rank * part, min((rank + 1) * part, length)
        padding = part - (last - first)
        shift = rank * piece * 0.92
        for x in (24, 566):
            c.text(x + shift, top + 10, f"rank {rank}", size=12, colour=FAINT)
            c.box(x + shift, top + 18, (part - padding) * cell, 36, f"{first} to {last - 1}", colour, size=12)
            if padding:
                c.box(x + shift + (part - padding) * cell, top + 18, padding * cell, 36, "", RED)
        c.text(276, top + 10, f"rank {rank}", size=12, colour=FAINT)
        c.box(276, top + 18, whole, 36, f"0 to {length - 1}", colour, size=12)
        c.arrow(28 + shift + piece, top + 36, 273, top + 36, VIOLET)
        c.arrow(280 + whole, top + 36, 562 + shift, top + 36, VIOLET)
    c.text(204, 136, "all-gather", size=12, colour=VIOLET, anchor="middle")
    c.text(577, 212, "reduce-scatter", size=12, colour=VIOLET, anchor="middle")
    c.box(24, 272, 12, 12, "", RED)
    c.text(
        44,
        283,
        f"padding ({part * tp - length} position): added after the sum, trimmed before attention and loss.",
        size=12,
    )
    c.text(
        24,
        305,
        "Backward is the mirror: the gather's backward is the reduce-scatter, and the other way round.",
        size=12,
        colour=FAINT,
    )
    return c.finish()
