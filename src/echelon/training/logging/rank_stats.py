"""A look at all ranks, every few steps: memory of the fullest, and what each one's steps are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from echelon.faults.flight_recorder import here
from echelon.faults.stragglers import Share, Straggler, starved, straggler
from echelon.layout import Mesh
from echelon.parallel.comm.mesh_axis import Axis
from echelon.training.async_copy import later

EVERY = 10
"""steps between two looks: each is a collective"""
LISTED = 64
"""ranks up to which the log lists every one"""
ENOUGH = 4
"""steps that must be seen before a rank is called slow"""
WIDTH = 5


@dataclass(frozen=True)
class Look:
    """What was seen."""

    memory: int
    steps: int
    """that the shares are means of; none in the first look"""
    shares: Sequence[Share]
    straggler: Straggler | None
    starved: float

    def record(self) -> dict[str, object]:
        """For the log."""
        found: dict[str, object] = {"steps": self.steps, "slow": None}
        if self.straggler is not None:
            found["slow"] = vars(self.straggler)
        if len(self.shares) <= LISTED:
            found |= {name: [getattr(s, name) for s in self.shares] for name in ("work", "data", "waiting")}
        return found


class Looks:
    """One rank's part of the looks."""

    def __init__(self, axis: Axis, device: torch.device, mesh: Mesh):
        self._axis, self._device, self._mesh = axis, device, mesh
        self._stages = [mesh.coordinates(rank)["pp"] for rank in range(axis.size)]
        self._steps: list[tuple[float, float, float]] = []
        """(work, waiting, data) of the steps since the last look"""
        self._mark = (0.0, 0.0)
        self._first = True

    def step(self, seconds: float) -> tuple[float, float]:
        """A step took so long: of it, waiting for ranks and for data."""
        here.poll()
        waited, loaded = here.waited - self._mark[0], here.loaded - self._mark[1]
        self._mark = (here.waited, here.loaded)
        if not self._first:  # the first step allocates
            self._steps.append((max(seconds - waited - loaded, 0.0), waited, loaded))
        self._first = False
        return waited, loaded

    def ask(self, memory: int) -> Callable[[], Look]:
        """All ranks must; the answer is read later, as a step's result is."""
        count = len(self._steps)
        # Medians: one step that the system interrupted says nothing of a rank.
        work, waited, loaded = (median(column) for column in zip(*self._steps, strict=True)) if count else (0.0,) * 3
        self._steps = []
        mine = [float(memory), float(count), work, loaded, waited]
        part = torch.tensor(mine, dtype=torch.float64, device=self._device)
        whole = torch.empty(WIDTH * self._axis.size, dtype=torch.float64, device=self._device)
        pending = self._axis.start_all_gather(whole, part)
        if whole.is_cuda:
            pending.wait()  # of the device, not of the host
            told = later(whole)
            return lambda: self._seen(told())

        def ask() -> Look:
            pending.wait()
            return self._seen(whole.tolist())

        return ask

    def _seen(self, numbers: Sequence[float]) -> Look:
        rows = [numbers[start : start + WIDTH] for start in range(0, len(numbers), WIDTH)]
        shares = [Share(work, data, waiting) for _, _, work, data, waiting in rows]
        steps = int(min(row[1] for row in rows))
        slow = straggler(shares, self._stages) if steps >= ENOUGH else None
        return Look(int(max(row[0] for row in rows)), steps, shares, slow, starved(shares) if steps >= ENOUGH else 0.0)

    def position(self, rank: int) -> str:
        return position(self._mesh, rank)


def position(mesh: Mesh, rank: int) -> str:
    """Where a rank stands, in words: `dp 1, tp 0`; only axes with more than one rank."""
    at = mesh.coordinates(rank)
    names = [name for name in ("pp", "dp", "cp", "tp") if getattr(mesh.layout, name) > 1]
    if mesh.layout.ep > 1:
        names.append("ep")
    return ", ".join(f"{name} {at[name]}" for name in names) or "the only rank"
