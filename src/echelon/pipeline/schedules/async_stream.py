"""An endless stream of microbatches without a flush, and the versions of the weights that it needs.

[Note: an endless stream]

A stage runs F(m), then B(m - lag), then perhaps an update; `lag` is how far its forwards are ahead. With 3 stages:

    stage 0, lag 2   F0 F1 F2 B0 F3 B1 F4 B2 ...
    stage 1, lag 1   F0 F1 B0 F2 B1 F3 B2 ...
    stage 2, lag 0   F0 B0 F1 B1 F2 B2 ...

The microbatches of a run are cut into windows. A window has the forwards of its own microbatches and the backwards that
come up meanwhile; only the last one drains. So the lists of windows, one after the other, are those of one long window.

[Note: kept versions]

An update makes version v + 1 while microbatches that were promised version v, or an older one, are still on their way.

1. Before the update, K keeps version v if a later action uses it.
2. After the last backward that uses it, D drops it.

A window does not know whether it is the last one, so K always supposes that the stream goes on. When a stream drains,
what was kept for microbatches that do not come is dropped first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement

UNUSED = -1
"""the last use of a version that nobody uses any more"""


@dataclass(frozen=True, kw_only=True)
class WeightVersionRule:
    """What a stage does with its weights in an endless stream."""

    lag: int
    """how many forwards the stage runs before its first backward, beside the one that it follows"""
    version: Callable[[int], int]
    """the version of the weights that a microbatch uses; it never falls"""
    last_microbatch: Callable[[int], int]
    """the last microbatch that uses a version"""
    microbatches_per_update: int = 1
    """microbatches whose gradients make one update"""


def stream_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    rule: Callable[[int], WeightVersionRule],
    *,
    first_microbatch: int,
    drain: bool,
    note: str = "",
) -> Schedule:
    """The window of microbatches from `first` on, with a rule for each stage. See [Note: an endless stream]."""
    lists = tuple(
        tuple(_window(stage, rule(stage), first_microbatch, first_microbatch + microbatches, drain))
        for stage in range(ranks)
    )
    return Schedule(
        name=name, rank_of_stage=looped_placement(ranks), microbatches=microbatches, rank_actions=lists, note=note
    )


def _window(
    stage: int, rule: WeightVersionRule, first_microbatch: int, end_microbatch: int, drain: bool
) -> Iterator[Action]:
    for m in range(first_microbatch, end_microbatch):
        yield Action(stage, ActionKind.FORWARD, m, version=rule.version(m))
        if m >= rule.lag:
            yield from _backward(stage, rule, m - rule.lag, rule.last_microbatch)
    if drain:
        yield from _drain(stage, rule, end_microbatch)


def _backward(stage: int, rule: WeightVersionRule, m: int, last_microbatch: Callable[[int], int]) -> Iterator[Action]:
    """A backward and what follows from it. See [Note: kept versions]; `last` is the last use of a version."""
    used, in_force = rule.version(m), m // rule.microbatches_per_update
    yield Action(stage, ActionKind.BACKWARD, m, version=used)
    if used < in_force and last_microbatch(used) == m:
        yield Action(stage, ActionKind.DROP_STASHED, used)
    if (m + 1) % rule.microbatches_per_update == 0:
        if last_microbatch(in_force) > m:
            yield Action(stage, ActionKind.STASH, in_force)
        yield Action(stage, ActionKind.UPDATE, in_force + 1)


def _drain(stage: int, rule: WeightVersionRule, end_microbatch: int) -> Iterator[Action]:
    """The backwards that are left when no microbatch comes any more."""
    newest, first = rule.version(end_microbatch - 1), max(0, end_microbatch - rule.lag)
    for version in range(newest + 1 if first < end_microbatch else newest, first // rule.microbatches_per_update):
        is_kept = rule.last_microbatch(version) >= (version + 1) * rule.microbatches_per_update
        if is_kept and rule.last_microbatch(version) >= first:
            yield Action(stage, ActionKind.DROP_STASHED, version)
    for m in range(first, end_microbatch):
        yield from _backward(
            stage,
            rule,
            m,
            lambda version: min(rule.last_microbatch(version), end_microbatch - 1) if version <= newest else UNUSED,
        )
