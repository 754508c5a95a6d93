"""From text to a layout that can be used, or to every fault of it at once."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.layout import grammar
from echelon.layout.faults import FaultError
from echelon.layout.layout import Layout
from echelon.layout.rules import RULES, Facts, ModelFacts, Rule, explain


def check(
    text: str,
    *,
    world: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    model: ModelFacts | None = None,
) -> Layout:
    """Reads one layout and asks every rule. Raises FaultError with the faults of the text and of the rules together.

    >>> str(check("tp=2", world=4, batch=8))
    'dp=2,tp=2,microbatch=4'
    """
    return parse(text, Facts(world=world, batch=batch, seq_len=seq_len, model=model))


def parse(text: str, facts: Facts, rules: Sequence[Rule] = RULES) -> Layout:
    """Reads one layout and asks some rules. What cannot be read keeps its default, so the rules are still asked."""
    reading = grammar.read(text)
    faults = [*reading.faults, *explain(reading.given, facts, rules, reading.unreadable)]
    if faults:
        raise FaultError(faults)
    return Layout.resolve(reading.given, world=facts.world, batch=facts.batch)
