"""What is wrong with the keys of `spike.` and `replay.`: no way back, steps that cannot be computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from echelon.layout import Layout, ValidationIssue
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.memory.offload.cost import offloads_optimizer, offloads_params

if TYPE_CHECKING:
    from echelon.config.run_config import Config


def guard_rules(config: Config, layout: Layout) -> Iterator[tuple[tuple[str, ...], ValidationIssue]]:
    """The keys a rule reads, and the fault it found."""
    if config.spike.action == "rollback" and not config.checkpoint.every:
        rule = "has no checkpoint to go back to (checkpoint.every=0)"
        legal = "none, warn, or checkpoint.every > 0"
        yield (
            ("spike.action", "checkpoint.every"),
            ValidationIssue(key="spike.action", value="rollback", message=rule, legal=legal),
        )
    if config.replay.every:
        for other, rule, legal in _replay_conflicts(config, layout):
            value = str(config.replay.every)
            yield (
                ("replay.every", other),
                ValidationIssue(key="replay.every", value=value, message=rule, legal=f"0, or {legal}"),
            )


def _replay_conflicts(config: Config, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(key, why a step cannot be computed again before its update, the remedy)."""
    if layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES:
        rule = f"cannot repeat a step whose updates come before its end (schedule={layout.schedule})"
        yield "layout", rule, "layout=...,schedule=1f1b"
    if config.optimizer.in_backward:
        yield "optimizer.in_backward", "cannot repeat a step that updates in backward", "optimizer.in_backward=false"
    if offloads_optimizer(layout.offload) or offloads_params(layout.offload):
        rule = f"cannot repeat a step whose gradients leave the device as they come (offload={layout.offload})"
        yield "layout", rule, "layout=... without offload of optimizer, params or disk"


def guard_keys_without_effect(config: Config) -> dict[str, str]:
    """Keys that do nothing, each with why."""
    if config.replay.every:
        return {}
    return dict.fromkeys(("replay.action", "replay.tolerance"), "replay.every=0, which makes no checks")
