"""The peak memory of a step over the number of layers. `python docs/pictures/kept.py` measures it."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from activations import MEASURED, measured, slope
from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas

COLOURS = {"none": INK, "selective": VIOLET, "ops": ORANGE, "every:2": RED, "full": BLUE, "sqrt": GREEN}
DEPTHS = (4, 8, 16, 32, 64)
LEFT, TOP, WIDE, HIGH = 90.0, 70.0, 480.0, 260.0


def kept_over_layers() -> str:
    curves = measured()
    sizes = [size for points in curves.values() for _, size in points]
    low, high = math.log2(min(sizes)) - 0.2, math.log2(max(sizes)) + 0.2

    def place(layers: float, size: float) -> tuple[float, float]:
        across = math.log2(layers / DEPTHS[0]) / math.log2(DEPTHS[-1] / DEPTHS[0])
        return LEFT + WIDE * across, TOP + HIGH * (high - math.log2(size)) / (high - low)

    c = Canvas(390, "The most that is alive in a step, over the number of layers (measured)")
    c.text(
        24, 56, "MiB, and layers, in logarithms: a slope of 1 is growth with the layers, 0.5 with their root", size=12
    )
    for power in range(math.ceil(low), math.floor(high) + 1):
        _, y = place(DEPTHS[0], 2.0**power)
        c.line(LEFT, y, LEFT + WIDE, y, "#d8dee6")
        c.text(LEFT - 8, y + 4, f"{2.0 ** (power - 20):g}", size=12, anchor="end", colour=FAINT)
    for layers in DEPTHS:
        c.text(place(layers, 2.0**low)[0], TOP + HIGH + 20, str(layers), size=12, anchor="middle", colour=FAINT)
    ends: list[float] = []
    for word, points in sorted(curves.items(), key=lambda item: -item[1][-1][1]):
        for one, other in pairwise(points):
            c.line(*place(*one), *place(*other), COLOURS[word])
        _, y = place(*points[-1])
        y = max([y, *(end + 17 for end in ends[-1:])])
        ends.append(y)
        c.text(LEFT + WIDE + 12, y + 4, f"recompute={word}", mono=True, size=12, colour=COLOURS[word])
        c.text(LEFT + WIDE + 150, y + 4, f"slope {slope(points):.2f}", size=12, colour=FAINT)
    return c.finish()


def measure() -> None:
    """Of a GPT with dropout: bytes of tensors that are made in a step and alive at once, less those of no layer."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    import torch
    from laid_out import SGD, batch_of, tiny
    from living import LivingBytes

    from echelon import models
    from echelon.training.engine import Engine

    torch.set_num_threads(1)
    found: dict[str, dict[int, int]] = {}
    for word in COLOURS:
        for layers in DEPTHS:
            shape = tiny("gpt", layers=layers, width=64, kv_heads=4, ffn=256, vocab=16, max_seq_len=64, dropout=0.1)
            engine = Engine(models.build(shape, "meta"), f"recompute={word}", SGD)
            engine.model.train()
            batch = batch_of(shape, 2, 64)
            engine.step(batch)
            with LivingBytes() as seen:
                engine.step(batch)
            found.setdefault(word, {})[layers] = seen.peak
        print(word, found[word], f"slope {slope(list(found[word].items())):.2f}", flush=True)
    MEASURED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure()
