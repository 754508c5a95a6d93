"""From text to a valid layout, or to every issue of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.layout import grammar
from echelon.layout.layout import Layout
from echelon.layout.rules import RULES, LayoutConstraints, LayoutRule, ModelDimensions, explain_violations
from echelon.layout.validation_error import ValidationError, ValidationIssue


def check_layout(
    text: str,
    *,
    world: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    model: ModelDimensions | None = None,
) -> Layout:
    """Parse one layout and check every rule. Raises ValidationError with the issues of the text and of the rules.

    >>> str(check_layout("tp=2", world=4, batch=8))
    'dp=2,tp=2,microbatch=4'
    """
    return parse_layout(text, LayoutConstraints(world=world, batch=batch, seq_len=seq_len, model=model))


def check_layouts(text: str, *, seq_len: int | None = None, model: ModelDimensions | None = None) -> list[Layout]:
    """Parse and check layouts between semicolons. Raises ValidationError with the issues of all of them."""
    return parse_layouts(text, LayoutConstraints(seq_len=seq_len, model=model))


def parse_layouts(text: str, constraints: LayoutConstraints, rules: Sequence[LayoutRule] = RULES) -> list[Layout]:
    """Parse layouts between semicolons; an issue of one of several names the layout."""
    layouts: list[Layout] = []
    issues: list[ValidationIssue] = []
    parts = [part.strip() for part in text.split(";") if part.strip()] or [""]
    for part in parts:
        try:
            layouts.append(parse_layout(part, constraints, rules))
        except ValidationError as error:
            where = f'in "{part}"' if len(parts) > 1 else ""
            issues += [replace(issue, hint="; ".join(filter(None, (issue.hint, where)))) for issue in error.issues]
    if issues:
        raise ValidationError(issues)
    return layouts


def parse_layout(text: str, constraints: LayoutConstraints, rules: Sequence[LayoutRule] = RULES) -> Layout:
    """Parse one layout and check some rules. An unreadable key keeps its default, so the rules are still checked."""
    parsed = grammar.parse_pairs(text)
    issues = [*parsed.issues, *explain_violations(parsed.values, constraints, rules, parsed.unreadable)]
    if issues:
        raise ValidationError(issues)
    return Layout.resolve(parsed.values, world=constraints.world, batch=constraints.batch)
