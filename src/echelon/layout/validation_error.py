"""`ValidationError`: every issue of a user's input at once, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from echelon.layout.aliases import ALIASES

MAX_SHOWN = 200
"""characters of a key or value in a message"""


@dataclass(frozen=True)
class ValidationIssue:
    """One invalid value, with the values that would be legal."""

    key: str
    """the invalid key"""
    value: str
    """the given value as text; empty if none was given"""
    message: str
    """what is wrong, as the end of a sentence that starts with key=value"""
    legal: str = field(default="", kw_only=True)
    """the legal values"""
    hint: str = field(default="", kw_only=True)
    """a remedy, or "did you mean" """

    def __str__(self) -> str:
        value = self.value if len(self.value) <= MAX_SHOWN else f"{self.value[:MAX_SHOWN]}…"
        key = self.key if len(self.key) <= MAX_SHOWN else f"{self.key[:MAX_SHOWN]}…"
        given = f"{key}={value}" if value else key
        parts = [f"{given} {self.message}", f"legal: {self.legal}" if self.legal else "", self.hint]
        # A value may hold a line break; an issue stays on one line.
        return " ".join("; ".join(part for part in parts if part).split())


class ValidationError(ValueError):
    """Every issue of an input at once, one per line.

    >>> try:
    ...     ec.Layout.parse("tpp=2")
    ... except ec.ValidationError as error:
    ...     print(error.issues[0].hint)
    did you mean "tp"?
    """

    issues: tuple[ValidationIssue, ...]

    def __init__(self, issues: Iterable[ValidationIssue]):
        self.issues = tuple(issues)
        # The issues are the exception's arguments, so that it can be pickled between processes.
        super().__init__(self.issues)

    @classmethod
    def single(cls, key: str, value: str, message: str, *, legal: str = "", hint: str = "") -> ValidationError:
        """The error of one issue."""
        return cls([ValidationIssue(key=key, value=value, message=message, legal=legal, hint=hint)])

    def __str__(self) -> str:
        return "\n".join(str(issue) for issue in self.issues)


def closest_word(word: str, words: Iterable[str]) -> str:
    """Return the word that was probably meant, or "": another framework's name first, then the nearest spelling."""
    plain = word.strip().lower().replace("-", "_")
    spellings = {known.lower().replace("-", "_"): known for known in words}
    for known in tuple(spellings.values()):
        for alias in ALIASES.get(known, ()):
            spellings.setdefault(alias, known)
    near = get_close_matches(plain, spellings, n=1, cutoff=0.7)
    return spellings[near[0]] if near else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a question for the end of an issue, or "" if no known word is near.

    >>> did_you_mean("tensor_paralel", ["dp", "tp"])
    'did you mean "tp"?'
    """
    meant = closest_word(word, words)
    return f'did you mean "{meant}"?' if meant else ""
