"""Drawings of what happens in a step: overlap, accumulation, recomputation, the loss contract, dropout masks."""

from __future__ import annotations

from fractions import Fraction

from svg import BLUE, FAINT, GREEN, INK, ORANGE, PALE, RED, VIOLET, Canvas


def backward_timeline() -> str:
    units = ("blocks.3", "blocks.2", "blocks.1", "blocks.0", "root")
    c = Canvas(296, "Backward with overlapped reductions (a drawing, not a measurement)")
    c.text(24, 62, "One bucket per parameter group. Its reduction starts after its last gradient.", colour=FAINT)
    c.text(24, 118, "compute", weight="bold", size=12)
    c.text(24, 182, "network", weight="bold", size=12)
    x, wide, free = 110.0, 112.0, 0.0
    for unit in units:
        c.box(x, 92, wide - 6, 40, unit, BLUE, size=12)
        start = max(x + wide - 6, free)
        c.line(x + wide - 6, 132, start + 4, 160, FAINT, dash=True, arrow=True)
        long = 84 if unit != "root" else 60
        c.box(start + 4, 162, long - 8, 34, "reduce" if unit != "root" else "root", ORANGE, size=12)
        free = start + long
        x += wide
    c.line(x - 6, 84, x - 6, 212, INK, dash=True)
    c.text(x - 10, 226, "backward ends", size=12, colour=FAINT, anchor="end")
    c.text(x - 2, 226, "exposed", size=12, colour=RED)
    c.text(
        24,
        256,
        "Units reduce in one fixed order, the reverse of forward, so ranks never wait for different collectives.",
        size=12,
    )
    c.text(
        24,
        276,
        "A reduction overlaps with the backward of later groups. The root comes last: it is exposed.",
        size=12,
    )
    return c.finish()


def recompute() -> str:
    c = Canvas(304, "Saved activations, with 4 layers")
    parts = ("norm", "q k v", "attention", "MLP")
    for row, (word, kept) in enumerate((("none", True), ("full", False))):
        top = 66 + row * 106
        c.text(24, top + 22, f"recompute={word}", mono=True, size=13)
        for layer in range(4):
            x = 190 + layer * 148
            c.box(x, top, 26, 76, "in", GREEN, size=11)
            for number, part in enumerate(parts):
                where = (x + 30 + number % 2 * 54, top + number // 2 * 39, 50, 37)
                if kept:
                    c.box(*where, part, BLUE, size=10)
                else:
                    c.rect(*where, dash=True)
                    c.text(where[0] + 25, where[1] + 22, part, size=10, colour=FAINT, anchor="middle")
        text = "saved" if kept else "recomputed"
        c.text(24, top + 44, text, size=12, colour=FAINT)
        c.text(24, top + 60, "" if kept else "in backward", size=12, colour=FAINT)
    c.legend(24, 284, {"input of a layer": GREEN, "saved inside a layer": BLUE})
    c.rect(336, 274, 12, 12, dash=True)
    c.text(354, 284, "not saved: one more forward of the layer recomputes it", size=12, colour=FAINT)
    return c.finish()


def loss_contract() -> str:
    sums = {("rank 0", "microbatch 0"): (9, 6), ("rank 0", "microbatch 1"): (4, 2)}
    sums |= {("rank 1", "microbatch 0"): (8, 1), ("rank 1", "microbatch 1"): (0, 0)}
    total, count = (sum(pair[i] for pair in sums.values()) for i in (0, 1))
    means = [Fraction(loss, n) for loss, n in sums.values() if n]
    wrong = sum(means, Fraction()) / len(means)
    c = Canvas(290, "The loss contract: sum, count, one division")
    for index, ((rank, microbatch), (loss, n)) in enumerate(sums.items()):
        x, y = 24 + index % 2 * 186, 62 + index // 2 * 84
        c.box(x, y, 172, 68, "", BLUE if rank == "rank 0" else GREEN)
        c.text(x + 12, y + 20, f"{rank}, {microbatch}", size=12, colour=FAINT)
        c.text(x + 12, y + 42, f"sum {loss}", mono=True, size=13)
        c.text(x + 12, y + 59, f"count {n}", mono=True, size=13)
        c.arrow(396, y + 34, 436, 128 + index // 2 * 34, FAINT)
    c.box(440, 104, 130, 80, f"sum {total}\ncount {count}", ORANGE)
    c.text(505, 96, "summed over all", size=12, colour=FAINT, anchor="middle")
    c.arrow(570, 144, 616, 144)
    c.box(620, 112, 156, 64, f"loss {total} / {count} = {float(Fraction(total, count)):.3g}", VIOLET)
    c.text(698, 104, "what one device says", size=12, colour=FAINT, anchor="middle")
    c.text(
        24,
        254,
        f"The mean of the microbatches' means would be {float(wrong):.3g}: wrong, because the counts differ.",
        size=13,
    )
    c.text(
        24,
        274,
        "A microbatch without a valid target adds nothing. A step without one updates nothing and says so.",
        size=13,
    )
    return c.finish()


def same_mask() -> str:
    import torch

    from echelon.rng import Dropout, RandomStream

    samples, length, p, cell = 4, 16, 0.3, 19
    stream = RandomStream(seed=0)
    drop = Dropout(p, "blocks.0.drop1", stream)

    def mask(rows: range, columns: range) -> list[list[bool]]:
        stream.samples = torch.arange(rows.start, rows.stop)
        drop.window = {1: (columns.start, length)}
        kept: list[list[bool]] = (drop(torch.ones(len(rows), len(columns))) != 0).tolist()
        return kept

    whole = mask(range(samples), range(length))
    c = Canvas(404, "One dropout mask, three layouts: real output of echelon.rng, seed 0, dropout 0.3")
    layouts = {
        "one device": [(range(samples), range(length))],
        "dp=2": [(range(2), range(length)), (range(2, 4), range(length))],
        "tp=2,sp=1": [(range(samples), range(8)), (range(samples), range(8, 16))],
    }
    for number, (name, parts) in enumerate(layouts.items()):
        top = 66 + number * 106
        c.text(24, top + 26, name, mono=True, size=14)
        for rank, (rows, columns) in enumerate(parts):
            dx = 170 + (columns.start and 40)
            dy = top + (rows.start and 12)
            part = mask(rows, columns)
            assert part == [[whole[row][column] for column in columns] for row in rows]
            colour = (BLUE, GREEN)[rank] if len(parts) > 1 else VIOLET
            for row in rows:
                for column in columns:
                    kept = part[row - rows.start][column - columns.start]
                    fill = colour if kept else PALE[colour]
                    c.rect(dx + column * cell, dy + row * cell, cell - 2, cell - 2, fill, fill)
            label = f"rank {rank}" if len(parts) > 1 else ""
            if label and len(columns) == length:
                c.text(dx + length * cell + 16, dy + rows.start * cell + 24, label, size=12, colour=FAINT)
            elif label:
                side = dx + length * cell + 16 if rank else dx - 56
                c.text(side, dy + 40, label, size=12, colour=FAINT)
        if not number:
            c.text(520, top + 22, "rows: samples 0 to 3", size=12, colour=FAINT)
            c.text(520, top + 40, "columns: positions 0 to 15", size=12, colour=FAINT)
            c.text(520, top + 58, "pale: set to zero", size=12, colour=FAINT)
    c.text(
        24,
        388,
        "Each rank computes only its part. Together the parts are the full mask, bit by bit.",
        size=13,
    )
    return c.finish()
