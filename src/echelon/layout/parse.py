"""From text to a layout that can be used, or to every fault of it at once."""

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
    """Reads one layout and asks every rule. Raises FaultError with the faults of the text and of the rules together.

    >>> str(check("tp=2", world=4, batch=8))
    'dp=2,tp=2,microbatch=4'
    """
    return parse_layout(text, LayoutConstraints(world=world, batch=batch, seq_len=seq_len, model=model))


def check_layouts(text: str, *, seq_len: int | None = None, model: ModelDimensions | None = None) -> list[Layout]:
    """Reads layouts that shall be run, between semicolons. Raises FaultError with the faults of all of them."""
    return parse_layouts(text, LayoutConstraints(seq_len=seq_len, model=model), to_run=True)


def parse_layouts(
    text: str, constraints: LayoutConstraints, rules: Sequence[LayoutRule] = RULES, *, to_run: bool = False
) -> list[Layout]:
    """Layouts between semicolons, and where one of several is at fault, which. `to_run` refuses what is plan only."""
    layouts: list[Layout] = []
    faults: list[ValidationIssue] = []
    parts = [part.strip() for part in text.split(";") if part.strip()] or [""]
    for part in parts:
        try:
            layouts.append(parse_layout(part, constraints, rules))
            missing = layouts[-1].plan_only if to_run else ()
            faults += [ValidationIssue(key="layout", value=str(layouts[-1]), message=reason) for reason in missing]
        except ValidationError as error:
            where = f'in "{part}"' if len(parts) > 1 else ""
            faults += [replace(fault, hint="; ".join(filter(None, (fault.hint, where)))) for fault in error.issues]
    if faults:
        raise ValidationError(faults)
    return layouts


def parse_layout(text: str, constraints: LayoutConstraints, rules: Sequence[LayoutRule] = RULES) -> Layout:
    """Reads one layout and asks some rules. What cannot be read keeps its default, so the rules are still asked."""
    reading = grammar.parse_pairs(text)
    faults = [*reading.issues, *explain_violations(reading.values, constraints, rules, reading.unreadable)]
    if faults:
        raise ValidationError(faults)
    return Layout.resolve(reading.values, world=constraints.world, batch=constraints.batch)
