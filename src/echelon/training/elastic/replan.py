"""Replanning after a loss of ranks: the planner's best layout for the remaining ones, with the same batch and model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.config.run_config import Config
from echelon.layout import Layout, ValidationError, grammar
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.models import user_model
from echelon.models.foreign.hf_source import is_hf_model
from echelon.planning.search.layout_search import search_plans
from echelon.training.run.auto_layout import plan_request_of

MAX_PLANS_TRIED = 32
"""best plans that are tried, since the configuration may be incompatible with some"""


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """A change of the layout between two attempts."""

    old_layout: str
    new_layout: str
    step_seconds: float | None
    """predicted step time; None for a custom model"""
    reason: str
    idle_ranks: tuple[int, ...] = ()
    """ranks that the new layout does not use"""

    @property
    def used_ranks(self) -> int:
        return Layout.parse(self.new_layout).world

    def record(self) -> dict[str, Any]:
        """Return the fields of the log record."""
        return {
            "from": self.old_layout,
            "to": self.new_layout,
            "why": self.reason,
            "ranks": self.used_ranks,
            "idle": list(self.idle_ranks),
            "predicted_step_s": self.step_seconds,
        }

    def __str__(self) -> str:
        parts = [f"layout {self.old_layout} -> {self.new_layout}, since {self.reason}"]
        if self.idle_ranks:
            names = ", ".join(map(str, self.idle_ranks))
            parts.append(f"rank {names} idles" if len(self.idle_ranks) == 1 else f"ranks {names} idle")
        if self.step_seconds is not None:
            parts.append(f"{self.step_seconds:.3g} s a step predicted")
        return "; ".join(parts)


def can_run(config: Config, ranks: int) -> bool:
    """Return whether the configured layout can run on this many ranks."""
    return not config.issues(world=ranks)


def plan_layout_change(
    config: Config, old_layout: str, available_ranks: int, *, reason: str, rank_numbers: Sequence[int] = ()
) -> LayoutChange | None:
    """Return the change to the best layout on the available ranks, or on fewer of them; None if no layout can run.

    `rank_numbers` names the available ranks, if not 0, 1, ….
    """
    for ranks in range(available_ranks, 0, -1):
        for layout, seconds in _candidate_layouts(config, ranks):
            used = Layout.parse(layout).world
            if can_run(replace(config, layout=layout), used):
                idle = tuple(rank_numbers or range(available_ranks))[used:]
                return LayoutChange(
                    old_layout=old_layout, new_layout=layout, step_seconds=seconds, reason=reason, idle_ranks=idle
                )
    return None


def _candidate_layouts(config: Config, ranks: int) -> Iterator[tuple[str, float | None]]:
    """Yield (layout, predicted step time), best first."""
    if user_model.is_user_model(config.model) or is_hf_model(config.model):
        yield from ((layout, None) for layout in _user_model_layouts(config.layout, ranks))
        return
    try:
        plans = search_plans(plan_request_of(config, ranks), top=MAX_PLANS_TRIED)
    except ValidationError:
        return
    for plan in plans:
        if not (plan.layout.pp > 1 and plan.layout.schedule in ASYNC_SCHEDULES):  # they change the mathematics
            yield str(plan.layout), plan.seconds


def _user_model_layouts(layout: str, ranks: int) -> Iterator[str]:
    """Layouts of a custom model, which the planner cannot price: with another dp degree, or data parallel alone."""
    given = {key: value for key, value in grammar.parse_pairs(layout).values.items() if key not in ("dp", "shard")}
    inside = Layout.resolve(given)
    split = inside.tp * inside.cp * inside.pp
    if ranks % split == 0:
        for left_out in ((), ("microbatch",), ("microbatch", "accumulate")):
            others = [f"{key}={value}" for key, value in given.items() if key not in left_out]
            yield ",".join([f"dp={ranks // split}", *others])
    yield f"dp={ranks}"
