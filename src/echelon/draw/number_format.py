"""Numbers as text: percentages, times, bytes, counts, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def format_seconds(value: float) -> str:
    """Three digits and a unit: `7.70 s`, `812 ms`."""
    if value >= 999.5:
        return f"{value:,.0f} s"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * size:
            return f"{_three_digits(value / size)} {unit}"
    return format_time(value, True)


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_seconds_aligned(values: Sequence[float]) -> list[str]:
    """Times in one unit and with equally many digits, to stand under each other."""
    size, unit = (1.0, "s") if max(values, default=0.0) >= 0.5 else (1e-3, "ms")
    digits = max(0, 3 - len(str(int(max(values, default=0.0) / size))) + (unit == "s"))
    return [f"{value / size:.{digits}f} {unit}" for value in values]


def format_bytes(count: float) -> str:
    """`1.5 GiB`, `28.2 MiB`, `3.1 KiB`."""
    if count >= 0.095 * 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 0.095 * 2**20 else f"{count / 2**10:.1f} KiB"


def format_count(count: float) -> str:
    """`68.1k` for 68,123."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{_three_digits(count / unit)}{letter}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """`3.2 days`, `5.0 h`, `12 s`."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def ticks(end: float, max_ticks: int) -> list[float]:
    """At most `max_ticks` steps of one round size, from 0 to `end`."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / max_ticks))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end / (power * factor) <= max_ticks)
    return [step * number for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]
