"""Another layout for the ranks that are left: what the planner says is best, with the same batch and the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.config.run_config import Config
from echelon.layout import FaultError, Layout, grammar
from echelon.layout.layout import ASYNCHRONOUS
from echelon.models import user_model
from echelon.planning.search.layout_search import search
from echelon.training.auto_layout import wish_of

TRIED = 32
"""plans of the best that are tried: what else a configuration asks for may forbid some"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """From one layout to another."""

    before: str
    after: str
    left: int
    """ranks that are there"""
    seconds: float | None
    """of a step, predicted; none for a module of your own"""
    idle: tuple[int, ...] = ()
    """ranks that have nothing to do"""
    why: str = ""

    @property
    def ranks(self) -> int:
        return Layout.parse(self.after).world

    def record(self) -> dict[str, Any]:
        """For the log."""
        facts: dict[str, Any] = {"from": self.before, "to": self.after, "why": self.why, "ranks": self.ranks}
        return {**facts, "idle": list(self.idle), "predicted_step_s": self.seconds}

    def __str__(self) -> str:
        parts = [f"layout {self.before} -> {self.after}, since {self.why}"]
        if self.idle:
            names = ", ".join(map(str, self.idle))
            parts.append(f"rank {names} idles" if len(self.idle) == 1 else f"ranks {names} idle")
        if self.seconds is not None:
            parts.append(f"{self.seconds:.3g} s a step predicted")
        return "; ".join(parts)


def suits(config: Config, ranks: int) -> bool:
    """Whether the layout that was asked for runs on so many ranks."""
    return not config.faults(world=ranks)


def change_of(config: Config, before: str, left: int, *, why: str, numbers: Sequence[int] = ()) -> Change | None:
    """To the best layout on the ranks that are left, or on fewer of them; none where nothing can be run.

    `numbers` are those of the ranks, where they are known by others than 0, 1, ….
    """
    for ranks in range(left, 0, -1):
        for layout, seconds in _layouts(config, ranks):
            used = Layout.parse(layout).world
            if suits(replace(config, layout=layout), used):
                idle = tuple(numbers or range(left))[used:]
                return Change(before=before, after=layout, left=left, seconds=seconds, idle=idle, why=why)
    return None


def _layouts(config: Config, ranks: int) -> Iterator[tuple[str, float | None]]:
    """(layout, predicted seconds of a step), best first."""
    if user_model.is_own(config.model):
        yield from ((layout, None) for layout in _of_own(config.layout, ranks))
        return
    try:
        plans = search(wish_of(config, ranks), top=TRIED)
    except FaultError:
        return
    for plan in plans:
        if not (plan.layout.pp > 1 and plan.layout.schedule in ASYNCHRONOUS):  # those train another way
            yield str(plan.layout), plan.seconds


def _of_own(layout: str, ranks: int) -> Iterator[str]:
    """A module that the planner does not know: as it was split, with other data-parallel ranks; or these alone."""
    given = {key: value for key, value in grammar.read(layout).given.items() if key not in ("dp", "shard")}
    inside = Layout.resolve(given)
    split = inside.tp * inside.cp * inside.pp
    if ranks % split == 0:
        for left_out in ((), ("microbatch",), ("microbatch", "accumulate")):
            kept = {key: value for key, value in given.items() if key not in left_out}
            yield ",".join(f"{key}={value}" for key, value in {"dp": ranks // split, **kept}.items())
    yield f"dp={ranks}"
