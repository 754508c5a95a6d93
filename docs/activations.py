"""What the code, and a measurement, say of recomputation: for tables.py and for the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from echelon.memory.checkpointing.cost import recompute_work
from echelon.models import model_config
from echelon.training.logging.metrics import recomputed_flops

Rows = list[Sequence[str]]

MEASURED = Path(__file__).parent / "pictures" / "kept.json"
"""what docs/pictures/kept.py wrote"""


def recomputed(model: str, seq_len: int) -> tuple[Sequence[str], Rows]:
    shape = model_config.find_model(model)
    flops = shape.flops_per_token(seq_len)
    attention, rows = flops - shape.flops_per_token(0), []
    for word in ("none", "ops", "selective", "full", "every:3", "sqrt"):
        found = recompute_work(word, layers=shape.layers, layer_bytes=1.0, input_bytes=0.0)
        again = recomputed_flops(found, flops - 6 * shape.vocab * shape.width, attention)
        cells = (f"{flops / 1e9:.3f}", f"{again / 1e9:.3f}", f"{1 + again / flops:.2f}")
        rows.append((f"`recompute={word}`", *cells))
    return ("layout", "GFLOP per token needed", "GFLOP per token recomputed", "HFU / MFU"), rows


def measured() -> dict[str, list[tuple[int, float]]]:
    """Layers, and the most bytes that were alive at once, for each way to recompute."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {word: [(int(layers), size) for layers, size in points.items()] for word, points in found.items()}


def kept_over_layers() -> tuple[Sequence[str], Rows]:
    found, rows = measured(), []
    for word, points in found.items():
        sizes_of = [f"{size / 2**20:.2f}" for _, size in points]
        rows.append((f"`recompute={word}`", *sizes_of, f"{slope(points):.2f}"))
    depths = [f"{layers} layers" for layers, _ in next(iter(found.values()))]
    return ("peak MiB", *depths, "slope"), rows


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Of a line through the logarithms."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return rise / sum((x - mean_x) ** 2 for x in xs)
