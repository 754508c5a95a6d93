"""Faults of what a user wrote: collected, never raised one by one, and shown all together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from echelon.layout.aliases import ALIASES


@dataclass(frozen=True, kw_only=True)
class ValidationIssue:
    """One thing that is wrong, with what would be right."""

    key: str
    """the key that is at fault"""
    value: str
    """what was given, as text; empty where nothing was"""
    message: str
    """what is broken, as the end of a sentence that starts with key=value"""
    legal: str = ""
    """the values that would work"""
    hint: str = ""
    """a remedy, or "did you mean" """

    def __str__(self) -> str:
        given = f"{self.key}={self.value}" if self.value else self.key
        parts = [f"{given} {self.message}", f"legal: {self.legal}" if self.legal else "", self.hint]
        # A value may hold a line break; a fault stays on one line.
        return " ".join("; ".join(part for part in parts if part).split())


class ValidationError(ValueError):
    """Every fault of an input at once, one per line."""

    issues: tuple[ValidationIssue, ...]

    def __init__(self, issues: Iterable[ValidationIssue]):
        self.issues = tuple(issues)
        # The faults are the exception's arguments, so that it can be pickled between processes.
        super().__init__(self.issues)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.issues)


def closest_word(word: str, words: Iterable[str]) -> str:
    """The word that was probably meant, or "": another framework's name for it first, then the nearest spelling."""
    plain = word.strip().lower().replace("-", "_")
    spellings = {known.lower().replace("-", "_"): known for known in words}
    for known in tuple(spellings.values()):
        for alias in ALIASES.get(known, ()):
            spellings.setdefault(alias, known)
    near = get_close_matches(plain, spellings, n=1, cutoff=0.7)
    return spellings[near[0]] if near else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A question for the end of a fault, or "" where nothing is near.

    >>> did_you_mean("tensor_paralel", ["dp", "tp"])
    'did you mean "tp"?'
    """
    meant = closest_word(word, words)
    return f'did you mean "{meant}"?' if meant else ""
