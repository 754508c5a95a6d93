"""Overrides of a solved sharding: lines of a pattern and a state, which the solver takes as fixed. No torch.

    blocks.*.mlp.up.weight = S0        # a parameter: how it is placed
    blocks.*.attn.scores   = R         # an operator: the state of its result

A pattern is one of fnmatch over the names of operators and parameters, as the table prints them. Every problem of the
text is reported at once, before anything is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.parallel.auto_sharding.sharding import Sharding
from echelon.parallel.auto_sharding.sharding_problem import ShardingProblem
from echelon.parallel.auto_sharding.split_table import layer_pattern


def parse_overrides(text: str) -> dict[str, str]:
    """Read lines of `pattern = state`; what follows # is a comment."""
    overrides: dict[str, str] = {}
    issues = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        pattern, equals, state = (part.strip() for part in content.partition("="))
        if not content:
            continue
        if not (pattern and equals and state):
            issues.append(ValidationIssue(f"line {number}", content, "is no override", legal="pattern = state"))
        elif overrides.setdefault(pattern, state) != state:
            issues.append(ValidationIssue(pattern, state, f"is {overrides[pattern]} in an earlier line; give one"))
    if issues:
        raise ValidationError(issues)
    return overrides


def fixed_states(problem: ShardingProblem, overrides: Mapping[str, str]) -> dict[int, Sharding]:
    """Return the states that overrides fix, by position, for `fixed` of `solve`."""
    issues: list[ValidationIssue] = []
    fixed: dict[int, Sharding] = {}
    origin: dict[int, str] = {}
    for pattern, text in overrides.items():
        positions = [number for number, op in enumerate(problem.ops) if _matches(op.name, op.param, pattern)]
        if not positions:
            issues.append(
                ValidationIssue(
                    pattern,
                    text,
                    "matches no operator and no parameter",
                    hint=did_you_mean(pattern, _known_names(problem)),
                )
            )
            continue
        legal = set.intersection(*({s.output for s in problem.ops[number].strategies} for number in positions))
        state = _parse_state(text)
        if state not in legal:
            message = "is a state that no strategy offers" if state else "is no state"
            issues.append(ValidationIssue(pattern, text, message, legal=", ".join(str(s) for s in sorted(legal))))
            continue
        for number in positions:
            if fixed.setdefault(number, state) != state:
                message = f"contradicts {origin[number]}={fixed[number]} for {problem.ops[number].name}"
                issues.append(ValidationIssue(pattern, text, message, hint="give one state"))
                break
            origin.setdefault(number, pattern)
    if issues:
        raise ValidationError(issues)
    return fixed


def _matches(name: str, param: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (bool(param) and fnmatchcase(param, pattern))


def _parse_state(text: str) -> Sharding | None:
    try:
        return Sharding.parse(text)
    except ValueError:
        return None


def _known_names(problem: ShardingProblem) -> list[str]:
    """Return every name, and that of equal layers with a star for the layer."""
    copies: dict[int, list[str]] = {}
    for op, first in zip(problem.ops, problem.first_copies, strict=True):
        copies.setdefault(first, []).append(op.param or op.name)
    plain = [name for op in problem.ops for name in (op.name, op.param) if name]
    return [layer_pattern(names) for names in copies.values()] + plain
