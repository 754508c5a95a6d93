"""Log records of runs with experts."""

from __future__ import annotations

import random
from typing import Any

from echelon.training.logging.expert_load import ExpertLoad


def record(step: int, counts: list[list[int]], dropped: list[int]) -> dict[str, Any]:
    """One record, with a layer for each list of counts."""
    loads = [
        ExpertLoad.from_counts(f"blocks.{at}.mlp", one, lost)
        for at, (one, lost) in enumerate(zip(counts, dropped, strict=True))
    ]
    return {"kind": "experts", "step": step, "layers": [load.record() for load in loads]}


def records(*, steps: int, layers: int, experts: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Random loads; the middle layer is the least balanced, and its second expert gets no tokens."""
    chance = random.Random(seed)
    found = []
    for step in range(1, steps + 1):
        counts = [[chance.randint(20, 60) for _ in range(experts)] for _ in range(layers)]
        counts[layers // 2][0] *= 10
        counts[layers // 2][1] = 0
        found.append(record(step, counts, [chance.randint(0, 9) for _ in counts]))
    return found
