"""Layer-wise groups: parameters, by patterns of their names, with a learning rate and a weight decay of their own.

    optimizer.groups = ["embed*:lr=0.5", "*norm*:weight_decay=0", "blocks.0.*:lr=0.1,weight_decay=0.01"]

`lr` is a factor of the rule's; `weight_decay` takes the place of the rule's, for vectors too. Where several patterns
match a name, the last one that says something about a key is right about it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from echelon.optim.update_rule import UpdateRule

KEYS = ("lr", "weight_decay")
GROUP_SYNTAX = "PATTERN:lr=NUMBER, PATTERN:weight_decay=NUMBER, or both joined by a comma"


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup:
    """Which parameters, and what is theirs."""

    pattern: str
    lr: float | None = None
    """factor of the rule's learning rate"""
    weight_decay: float | None = None


@dataclass(frozen=True)
class ParamSettings:
    """Of one parameter."""

    lr_factor: float
    """factor of the learning rate"""
    weight_decay: float


def parse(text: str) -> OptimizerGroup:
    """One group; raises ValueError with what is wrong."""
    pattern, colon, settings = text.rpartition(":")
    if not colon or not pattern or not settings:
        raise ValueError(f"is not a group of parameters ({text})")
    found: dict[str, float] = {}
    for setting in settings.split(","):
        key, _, value = (part.strip() for part in setting.partition("="))
        if key not in KEYS or key in found:
            raise ValueError(f"{'says twice' if key in found else 'has no such setting'} ({key})")
        try:
            found[key] = float(value)
        except ValueError:
            raise ValueError(f"is not a number ({key}={value})") from None
        if not 0 <= found[key] < float("inf"):
            raise ValueError(f"is out of range ({key}={value})")
    return OptimizerGroup(pattern=pattern.strip(), **found)


def check_patterns(rule: UpdateRule, names: Sequence[str]) -> None:
    """Raises where a pattern matches no parameter of the model."""
    given = {"optimizer.groups": [parse(text).pattern for text in rule.groups]}
    if rule.name == "muon" and rule.by_adamw != ADAMW_PATTERNS:
        given["optimizer.by_adamw"] = list(rule.by_adamw)
    for key, patterns in given.items():
        missed = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if missed:
            known = ", ".join(names[:9]) + (", ..." if len(names) > 9 else "")
            raise ValueError(f"no parameter matches the pattern ({key}: {', '.join(missed)}); the model has {known}")


def settings_for(groups: Sequence[OptimizerGroup], rule: UpdateRule, name: str, *, decays: bool) -> ParamSettings:
    """A parameter's own; `decays` where the rule's weight decay is for it."""
    lr, decay = 1.0, rule.weight_decay if decays else 0.0
    for group in groups:
        if fnmatchcase(name, group.pattern):
            lr = lr if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
    return ParamSettings(lr, decay)


ADAMW_PATTERNS = ("*embed*", "*positions*", "*wte*", "*wpe*", "head.*", "*lm_head*")
"""matrices that Muon leaves to AdamW: what is looked up, and the last one, of no model in particular"""


def is_muon_matrix(rule: UpdateRule, name: str, shape: Sequence[int]) -> bool:
    """A matrix inside the model."""
    return len(shape) >= 2 and not any(fnmatchcase(name, pattern) for pattern in rule.by_adamw)
