"""What is wrong with the keys of `spike.` and `replay.`: no way back, steps that cannot be computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from echelon.layout import Fault, Layout
from echelon.layout.layout import ASYNCHRONOUS
from echelon.memory.offload.cost import has_states, pages

if TYPE_CHECKING:
    from echelon.config.run_config import Config


def rules(config: Config, layout: Layout) -> Iterator[tuple[tuple[str, ...], Fault]]:
    """The keys a rule reads, and the fault it found."""
    if config.spike.action == "rollback" and not config.checkpoint.every:
        rule = "has no checkpoint to go back to (checkpoint.every=0)"
        legal = "none, warn, or checkpoint.every > 0"
        yield (
            ("spike.action", "checkpoint.every"),
            Fault(key="spike.action", value="rollback", rule=rule, legal=legal),
        )
    if config.replay.every:
        for other, rule, legal in _not_twice(config, layout):
            value = str(config.replay.every)
            yield ("replay.every", other), Fault(key="replay.every", value=value, rule=rule, legal=f"0, or {legal}")


def _not_twice(config: Config, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(key, why a step cannot be computed again before its update, the remedy)."""
    if layout.pp > 1 and layout.schedule in ASYNCHRONOUS:
        rule = f"cannot repeat a step whose updates come before its end (schedule={layout.schedule})"
        yield "layout", rule, "layout=...,schedule=1f1b"
    if config.optimizer.in_backward:
        yield "optimizer.in_backward", "cannot repeat a step that updates in backward", "optimizer.in_backward=false"
    if has_states(layout.offload) or pages(layout.offload):
        rule = f"cannot repeat a step whose gradients leave the device as they come (offload={layout.offload})"
        yield "layout", rule, "layout=... without offload of optimizer, params or disk"


def idle(config: Config) -> dict[str, str]:
    """Keys that do nothing, each with why."""
    if config.replay.every:
        return {}
    return dict.fromkeys(("replay.action", "replay.tolerance"), "replay.every=0, which makes no checks")
