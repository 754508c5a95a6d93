"""How well the planner does on runs that others measured: errors of time, of fitting, of choosing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of step times: |predicted / measured - 1|."""

    rows: int
    median: float
    p90: float


def errors(sources: Sequence[str], predicted: Array, measured: Array) -> dict[str, Errors]:
    """By source."""
    wrong = np.abs(predicted / measured - 1)
    found = {}
    for source in sorted(set(sources)):
        own = wrong[[i for i, other in enumerate(sources) if other == source]]
        found[source] = Errors(rows=len(own), median=float(np.median(own)), p90=float(np.quantile(own, 0.9)))
    return found
