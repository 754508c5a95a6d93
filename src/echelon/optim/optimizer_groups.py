"""Optimizer groups: learning rate factors and weight decay by patterns of parameter names. No torch.

    optimizer.groups = ["embed*:lr=0.5", "*norm*:weight_decay=0", "blocks.0.*:lr=0.1,weight_decay=0.01"]

`lr` multiplies the rule's learning rate; `weight_decay` replaces the rule's, for vectors too. Where several patterns
match a name, the last one that sets a key wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from echelon.optim.update_rule import ADAMW_PATTERNS, UpdateRule

KEYS = ("lr", "weight_decay")
GROUP_SYNTAX = "PATTERN:lr=NUMBER, PATTERN:weight_decay=NUMBER, or both joined by a comma"


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup:
    """A name pattern and its settings."""

    pattern: str
    lr: float | None = None
    """multiplies the rule's learning rate"""
    weight_decay: float | None = None


@dataclass(frozen=True)
class ParamSettings:
    """The settings of one parameter."""

    lr_factor: float
    """multiplies the learning rate"""
    weight_decay: float


def parse(text: str) -> OptimizerGroup:
    """Parse one group; raise ValueError with the fault."""
    pattern, colon, assignments = text.rpartition(":")
    if not colon or not pattern or not assignments:
        raise ValueError(f"is not a group of parameters ({text})")
    settings: dict[str, float] = {}
    for assignment in assignments.split(","):
        key, _, value = (part.strip() for part in assignment.partition("="))
        if key not in KEYS or key in settings:
            raise ValueError(f"{'repeats a setting' if key in settings else 'has an unknown setting'} ({key})")
        try:
            settings[key] = float(value)
        except ValueError:
            raise ValueError(f"is not a number ({key}={value})") from None
        if not 0 <= settings[key] < float("inf"):
            raise ValueError(f"is out of range ({key}={value})")
    return OptimizerGroup(pattern=pattern.strip(), **settings)


def check_patterns(rule: UpdateRule, names: Sequence[str]) -> None:
    """Raise where a pattern matches no parameter of the model."""
    patterns_by_key = {"optimizer.groups": [parse(text).pattern for text in rule.groups]}
    if rule.name == "muon" and rule.by_adamw != ADAMW_PATTERNS:
        patterns_by_key["optimizer.by_adamw"] = list(rule.by_adamw)
    for key, patterns in patterns_by_key.items():
        unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if unmatched:
            known = ", ".join(names[:9]) + (", ..." if len(names) > 9 else "")
            raise ValueError(f"no parameter matches the pattern ({key}: {', '.join(unmatched)}); the model has {known}")


def settings_for(groups: Sequence[OptimizerGroup], rule: UpdateRule, name: str, *, decays: bool) -> ParamSettings:
    """Return a parameter's settings; `decays` where the rule's weight decay applies to it."""
    lr, decay = 1.0, rule.weight_decay if decays else 0.0
    for group in groups:
        if fnmatchcase(name, group.pattern):
            lr = lr if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
    return ParamSettings(lr, decay)


def is_muon_matrix(rule: UpdateRule, name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates this parameter: a matrix that no `by_adamw` pattern names."""
    return len(shape) >= 2 and not any(fnmatchcase(name, pattern) for pattern in rule.by_adamw)
