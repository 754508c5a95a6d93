"""An endless stream of microbatches without a flush, and the weight versions that it needs.

[Note: an endless stream]

A stage runs F(m), then B(m - lag), then perhaps an update; `lag` is how far its forwards are ahead. With 3 stages:

    stage 0, lag 2   F0 F1 F2 B0 F3 B1 F4 B2 ...
    stage 1, lag 1   F0 F1 B0 F2 B1 F3 B2 ...
    stage 2, lag 0   F0 B0 F1 B1 F2 B2 ...

The microbatches of a run are cut into windows. A window has the forwards of its microbatches and the backwards that
become due meanwhile; only the last window drains. So consecutive windows together are one long window.

[Note: stashed versions]

An update makes version v + 1 while microbatches in flight still use version v or an older one.

1. Before the update, K stashes version v if a later action uses it.
2. After the last backward that uses it, D drops it.

A window does not know whether it is the last one, so K always assumes that the stream continues. When a stream drains,
D first drops the versions that were stashed for microbatches that do not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement

UNUSED = -1
"""the last microbatch of a version that is not used any more"""


@dataclass(frozen=True, kw_only=True)
class WeightVersionRule:
    """Which weight versions a stage uses in an endless stream."""

    lag: int
    """forwards before the first 1F1B pair"""
    version: Callable[[int], int]
    """the version that a microbatch uses; it never decreases"""
    last_microbatch: Callable[[int], int]
    """the last microbatch that uses a version"""
    microbatches_per_update: int = 1

    @classmethod
    def with_delay(cls, lag: int, delay: int) -> WeightVersionRule:
        """An update after every microbatch; a microbatch uses the version of `delay` updates ago."""
        return cls(lag=lag, version=lambda m: max(0, m - delay), last_microbatch=lambda version: version + delay)


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
    """The window from `first_microbatch` on, with a rule per stage. See [Note: an endless stream]."""
    end = first_microbatch + microbatches
    lists = tuple(tuple(_window(stage, rule(stage), first_microbatch, end, drain)) for stage in range(ranks))
    return Schedule(
        name=name, rank_of_stage=looped_placement(ranks), microbatches=microbatches, rank_actions=lists, note=note
    )


def _window(stage: int, rule: WeightVersionRule, first: int, end: int, drain: bool) -> Iterator[Action]:
    for m in range(first, end):
        yield Action(stage, ActionKind.FORWARD, m, version=rule.version(m))
        if m >= rule.lag:
            yield from _backward(stage, rule, m - rule.lag, rule.last_microbatch)
    if drain:
        yield from _drain(stage, rule, end)


def _backward(stage: int, rule: WeightVersionRule, m: int, last_microbatch: Callable[[int], int]) -> Iterator[Action]:
    """A backward and what follows from it. See [Note: stashed versions]; `last_microbatch` is a version's last use."""
    used, in_force = rule.version(m), m // rule.microbatches_per_update
    yield Action(stage, ActionKind.BACKWARD, m, version=used)
    if used < in_force and last_microbatch(used) == m:
        yield Action(stage, ActionKind.DROP_STASHED, used)
    if (m + 1) % rule.microbatches_per_update == 0:
        if last_microbatch(in_force) > m:
            yield Action(stage, ActionKind.STASH, in_force)
        yield Action(stage, ActionKind.UPDATE, in_force + 1)


def _drain(stage: int, rule: WeightVersionRule, end: int) -> Iterator[Action]:
    """The backwards that are left after the last microbatch."""
    newest, first = rule.version(end - 1), max(0, end - rule.lag)
    for version in range(newest + 1 if first < end else newest, first // rule.microbatches_per_update):
        is_stashed = rule.last_microbatch(version) >= (version + 1) * rule.microbatches_per_update
        if is_stashed and rule.last_microbatch(version) >= first:
            yield Action(stage, ActionKind.DROP_STASHED, version)

    def last_microbatch(version: int) -> int:
        return min(rule.last_microbatch(version), end - 1) if version <= newest else UNUSED

    for m in range(first, end):
        yield from _backward(stage, rule, m, last_microbatch)
