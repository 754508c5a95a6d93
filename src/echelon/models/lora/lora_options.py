"""Options of LoRA adapters, and their patterns of module names. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

MAX_LISTED = 12
"""names in an issue"""


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """What `add_lora` adds to a model; `LoRAConfig` documents and checks each of them."""

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    rslora: bool = False
    train: tuple[str, ...] = ()
    init: str = ""

    @property
    def scale(self) -> float:
        """The factor of the adapters' outputs."""
        return lora_scale(self.alpha, self.rank, rslora=self.rslora)


def lora_scale(alpha: float, rank: int, *, rslora: bool) -> float:
    return alpha / (rank**0.5 if rslora else rank)


def split_patterns(given: Sequence[str]) -> tuple[str, ...]:
    """The patterns of a list, each of which may be several joined by commas: `q_proj,v_proj`."""
    return tuple(part.strip() for text in given for part in text.split(",") if part.strip())


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a module's full name, or the end of it: `q_proj`, `*.q_proj`, `layers.0.*`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def match_names(given: Sequence[str], names: Collection[str], *, key: str, what: str) -> list[str]:
    """Return the names that any pattern matches, in order. Raise ValidationError for patterns that match none."""
    patterns = split_patterns(given)
    if issues := list(_unmatched(patterns, names, key, what)):
        raise ValidationError(issues)
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def _unmatched(patterns: Sequence[str], names: Collection[str], key: str, what: str) -> Iterator[ValidationIssue]:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            more = ", ..." if len(known) > MAX_LISTED else ""
            legal = f"patterns of names such as {', '.join(known[:MAX_LISTED])}{more}" if known else ""
            hint = did_you_mean(pattern.rpartition(".")[2], known)
            yield ValidationIssue(key=key, value=pattern, message=f"matches no {what}", legal=legal, hint=hint)
