"""The values of a key that repair a violated rule, found by trying them.

Hand-written legal values go stale when a rule is added, and each is right only for its own rule. Trying is right for
all rules: tp=8 on a world of 6 with 4 heads gives the divisors of 6 that also divide 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echelon.layout.grammar import KEYS_BY_NAME, Value

_MAX_TRIED = 256
"""Every number up to this is tried; above it, the divisors of the known sizes."""
_MAX_SHOWN = 12
"""More values than these are shown as a range, or as the nearest to the given one."""


@dataclass(frozen=True)
class Violation:
    """A rule that a layout violates."""

    keys: tuple[str, ...]
    """the keys that could repair it, the likeliest first"""
    message: str
    """the end of a sentence that starts with key=value"""
    hint: str = ""
    legal: str = ""
    """set if trying cannot find the legal values"""


Probe = Callable[[Mapping[str, Value]], Mapping[str, Violation]]
"""From given keys to their violations, by the name of the rule."""


class RemedySearch:
    """The search for one set of given keys. Each value of a key is tried once, for all violated rules."""

    def __init__(self, given: Mapping[str, Value], probe: Probe, sizes: Sequence[int]):
        self._given = given
        self._probe = probe
        self._sizes = sizes
        self._numbers = [*range(_MAX_TRIED + 1), *(n for size in sizes for n in _divisors(size))]
        self._before = probe(given)
        self._after: dict[str, dict[Value, Mapping[str, Violation]]] = {}

    def best_key(self, name: str, rule: Violation) -> tuple[str, str]:
        """Return the key to report and its legal values: the first that repairs the rule alone, or without others."""
        if rule.legal:
            return rule.keys[0], rule.legal
        # A value that violates another rule is no remedy if another key has one that violates none.
        keys = sorted(rule.keys, key=lambda key: not self._clean_values(key, name))
        for key in keys:
            if values := self._working_values(key, name):
                return key, _format_values(values, self._given.get(key))
        for key in rule.keys:
            others = [other for other in rule.keys if other != key and other in self._given]
            fewer = {known: value for known, value in self._given.items() if known not in others}
            if others and (values := RemedySearch(fewer, self._probe, self._sizes)._working_values(key, name)):
                return key, f"{_format_values(values, self._given.get(key))} without {' and '.join(others)}"
        return rule.keys[0], "none while the other keys stay"

    def repairs(self, key: str, name: str) -> bool:
        """Return whether some value of the key satisfies the rule."""
        return any(name not in left for left in self._try_values(key).values())

    def _working_values(self, key: str, name: str) -> list[Value]:
        """Return values that satisfy the rule, repair every rule this key can repair, and violate no other.

        If there is none, the last condition is dropped, then the second.
        """
        return (
            self._clean_values(key, name) or self._repairing_values(key, name) or list(self._meeting_values(key, name))
        )

    def _clean_values(self, key: str, name: str) -> list[Value]:
        meet = self._meeting_values(key, name)
        return [value for value in self._repairing_values(key, name) if meet[value].keys() <= self._before.keys()]

    def _repairing_values(self, key: str, name: str) -> list[Value]:
        mine = {other for other in self._before if self.repairs(key, other)}
        return [value for value, left in self._meeting_values(key, name).items() if not left.keys() & mine]

    def _meeting_values(self, key: str, name: str) -> dict[Value, Mapping[str, Violation]]:
        return {value: left for value, left in self._try_values(key).items() if name not in left}

    def _try_values(self, key: str) -> dict[Value, Mapping[str, Violation]]:
        if key not in self._after:
            values = KEYS_BY_NAME[key].syntax.candidates(self._numbers)
            self._after[key] = {value: self._probe({**self._given, key: value}) for value in values}
        return self._after[key]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(min(number, 10**9)) + 1) if number % n == 0]
    return [*small, *(number // n for n in small)]


def _format_values(values: Sequence[Value], given: Value | None) -> str:
    numbers = [value for value in values if isinstance(value, int)]
    if len(values) <= _MAX_SHOWN or len(numbers) < len(values):
        return ", ".join(str(value) for value in values)
    low, high = numbers[0], numbers[-1]
    if {*range(low, min(high, _MAX_TRIED) + 1)} <= {*numbers}:
        return f">= {low}" if high >= _MAX_TRIED else f"{low} to {high}"
    near = sorted(numbers, key=lambda n: abs(n - given) if isinstance(given, int) else n)[:_MAX_SHOWN]
    return ", ".join(str(n) for n in sorted(near)) + ", ..."
