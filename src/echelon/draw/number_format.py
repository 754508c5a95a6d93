"""Numbers as people read them: percentages, times, and the round numbers of an axis."""

from __future__ import annotations

import math


def percent(share: float) -> str:
    """`27.3 %` for 0.273; small shares keep two digits."""
    return f"{100 * share:.1f} %" if share >= 0.01 or not share else f"{100 * share:.2g} %"


def format_time(value: float, seconds: bool = True) -> str:
    """`1.25 s`, `812 ms`, `3.1 µs`; a bare number where times are in no unit (`seconds` false)."""
    if not seconds:
        return f"{value:.6g}"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs" if value else "0 s"


def ticks(end: float, max_ticks: int) -> list[float]:
    """At most `max_ticks` steps of one round size, from 0 to `end`."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / max_ticks))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end / (power * factor) <= max_ticks)
    return [step * number for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]
