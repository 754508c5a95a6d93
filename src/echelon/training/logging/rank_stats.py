"""Rank statistics, gathered every few steps: peak memory, times for work, data and waiting, the user's batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from echelon.faults.stragglers import RankStepTime, Straggler, data_starvation, find_straggler
from echelon.layout import Mesh
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.training.step_result import start_host_copy

COLLECT_EVERY = 10
"""steps between two collections: each is an all-gather"""
MAX_LISTED_RANKS = 64
"""number of ranks up to which the log lists each of them"""
MIN_STEPS = 4
"""steps that must be measured before a rank counts as a straggler"""
VALUES_PER_RANK = 6


@dataclass(frozen=True)
class RankStats:
    """Statistics of all ranks."""

    peak_memory: int
    num_steps: int
    """steps that the times are medians of; 0 in the first collection"""
    shares: Sequence[RankStepTime]
    straggler: Straggler | None
    starved: float
    ranks_with_other_batch: tuple[int, ...] = ()
    """ranks whose global batch is not that of rank 0"""

    def record(self) -> dict[str, object]:
        """Return the fields of the log record."""
        fields: dict[str, object] = {"steps": self.num_steps, "slow": None}
        if self.straggler is not None:
            fields["slow"] = vars(self.straggler)
        if len(self.shares) <= MAX_LISTED_RANKS:
            fields |= {name: [getattr(s, name) for s in self.shares] for name in ("work", "data", "waiting")}
        return fields


class RankStatsCollector:
    """Collects the statistics of this rank, and gathers those of all ranks."""

    def __init__(self, axis: MeshAxis, device: torch.device, mesh: Mesh):
        self._axis, self._device, self._mesh = axis, device, mesh
        self._stages = [mesh.coordinates(rank)["pp"] for rank in range(axis.size)]
        self._steps: list[tuple[float, float, float]] = []
        """(work, waiting, data) seconds of the steps since the last collection"""
        self._recorded_totals = (0.0, 0.0)
        self._first = True

    def add_step(self, seconds: float) -> tuple[float, float]:
        """Add a step's seconds; return those spent waiting for other ranks and for data."""
        recorder = self._axis.recorder
        recorder.poll_device_waits()
        waited, loaded = recorder.wait_s - self._recorded_totals[0], recorder.data_wait_s - self._recorded_totals[1]
        self._recorded_totals = (recorder.wait_s, recorder.data_wait_s)
        if not self._first:  # the first step allocates
            self._steps.append((max(seconds - waited - loaded, 0.0), waited, loaded))
        self._first = False
        return waited, loaded

    def start_gather(self, memory: int, batch_fingerprint: float = 0.0) -> Callable[[], RankStats]:
        """Start the all-gather, on all ranks; the returned function reads it, as late as a step's result."""
        count = len(self._steps)
        # Medians, because one step that the system interrupted says nothing about a rank.
        work, waited, loaded = (median(column) for column in zip(*self._steps, strict=True)) if count else (0.0,) * 3
        self._steps = []
        mine = [float(memory), float(count), work, loaded, waited, batch_fingerprint]
        part = torch.tensor(mine, dtype=torch.float64, device=self._device)
        gathered = torch.empty(VALUES_PER_RANK * self._axis.size, dtype=torch.float64, device=self._device)
        read_values = start_host_copy(gathered, self._axis.start_all_gather(gathered, part))
        return lambda: self._to_stats(read_values())

    def _to_stats(self, numbers: Sequence[float]) -> RankStats:
        rows = [numbers[start : start + VALUES_PER_RANK] for start in range(0, len(numbers), VALUES_PER_RANK)]
        shares = [RankStepTime(work, data, waiting) for _, _, work, data, waiting, _ in rows]
        steps = int(min(row[1] for row in rows))
        slow = find_straggler(shares, self._stages) if steps >= MIN_STEPS else None
        starved = data_starvation(shares) if steps >= MIN_STEPS else 0.0
        other = tuple(rank for rank, row in enumerate(rows) if row[-1] != rows[0][-1])
        return RankStats(int(max(row[0] for row in rows)), steps, shares, slow, starved, other)

    def mesh_position(self, rank: int) -> str:
        return mesh_position(self._mesh, rank)


def mesh_position(mesh: Mesh, rank: int) -> str:
    """Return the mesh coordinates of a rank as `dp 1, tp 0`, for axes with more than one rank."""
    at = mesh.coordinates(rank)
    names = [name for name in ("pp", "dp", "cp", "tp") if getattr(mesh.layout, name) > 1]
    if mesh.layout.ep > 1:
        names.append("ep")
    return ", ".join(f"{name} {at[name]}" for name in names) or "the only rank"
