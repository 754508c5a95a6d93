"""How evenly a run used its experts, step by step, in bounded room: read from its log as a stream.

[Note: columns of steps]

A log may have a hundred thousand steps, a picture has room for a hundred columns. A column is a number of steps in a
row: 1 at first; when there is no room for another, pairs become one. A figure of a column is the mean over its steps;
loads are those of all its steps together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any, Self

from echelon.training.run_dir import Run, RunError

KIND = "experts"
"""of lines in the log"""
ROOM = 120


@dataclass
class Column:
    """A layer in some steps."""

    steps: int
    most: float
    """sums over the steps, as of entropy and dead"""
    entropy: float
    dead: float
    dropped: int
    assigned: int
    counts: list[int] | None
    """of each expert, in those of the steps that have them"""

    def joined(self, other: Column) -> Column:
        counts = self.counts or other.counts
        if self.counts is not None and other.counts is not None:
            counts = list(map(add, self.counts, other.counts))
        return Column(
            self.steps + other.steps,
            self.most + other.most,
            self.entropy + other.entropy,
            self.dead + other.dead,
            self.dropped + other.dropped,
            self.assigned + other.assigned,
            counts,
        )

    @property
    def loads(self) -> list[float]:
        """Of each expert, to the mean."""
        if self.counts is None:
            return []
        mean = sum(self.counts) / len(self.counts)
        return [count / mean if mean else 0.0 for count in self.counts]

    @property
    def figures(self) -> dict[str, float]:
        """Of the average step."""
        dropped = 100 * self.dropped / self.assigned if self.assigned else 0.0
        found = {"max/mean": self.most, "entropy": self.entropy, "dead": self.dead}
        return {**{name: value / self.steps for name, value in found.items()}, "dropped %": dropped}


@dataclass
class Layer:
    name: str
    columns: list[Column] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """what the log says of the last step"""
    worst: float = 0.0
    """the highest max/mean of a step"""
    worst_step: int = 0

    @property
    def experts(self) -> int:
        return max((len(column.counts) for column in self.columns if column.counts), default=0)

    def total(self) -> Column:
        first, *others = self.columns
        for other in others:
            first = first.joined(other)
        return first

    def late(self) -> float:
        """max/mean of the average step in the second half."""
        half = self.columns[len(self.columns) // 2 :]
        return sum(column.most for column in half) / sum(column.steps for column in half)

    def never(self) -> list[int]:
        """Experts that got no token in any step whose counts are known."""
        return [expert for expert, count in enumerate(self.total().counts or ()) if not count]


@dataclass(kw_only=True)
class History:
    """Of a run: its layers, each in the same columns of steps; see [Note: columns of steps]."""

    name: str = ""
    layers: list[Layer] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """first and last step of every column"""
    room: int = ROOM
    _length: int = 1
    _open: int = 0
    """steps that the last column has"""

    @classmethod
    def read(cls, folder: Path, room: int = ROOM) -> Self:
        """Of a run's directory; without layers where nothing is logged. A run may have been killed, or be going on."""
        if not (folder / "log.jsonl").is_file():
            return cls(name=folder.name)
        return cls.of(Run(path=folder).records(KIND), name=folder.resolve().name, room=room)

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]], *, name: str = "", room: int = ROOM) -> Self:
        found = cls(name=name, room=room)
        for record in records:
            try:
                found.add(int(record["step"]), record["layers"])
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"the log's lines of experts cannot be read ({name}: {type(error).__name__}: {error})"
                ) from error
        found._close()
        return found

    def add(self, step: int, layers: list[dict[str, Any]]) -> None:
        if self.spans and step <= self.spans[-1][1]:
            return  # told before
        columns = [
            Column(
                1, one["most"], one["entropy"], one["dead"], one["dropped"], one["assigned"], one.get("counts") or None
            )
            for one in layers
        ]
        if not self.layers:
            self.layers = [Layer(one["layer"]) for one in layers]
        if len(layers) != len(self.layers):
            raise ValueError(f"{len(layers)} layers, and {len(self.layers)} before")
        if 0 < self._open < self._length:
            self.spans[-1] = self.spans[-1][0], step
            for layer, column in zip(self.layers, columns, strict=True):
                layer.columns[-1] = layer.columns[-1].joined(column)
        else:
            self._make_room()
            self.spans.append((step, step))
            for layer, column in zip(self.layers, columns, strict=True):
                layer.columns.append(column)
            self._open = 0
        self._open += 1
        for layer, one in zip(self.layers, layers, strict=True):
            layer.last = one
            if one["most"] > layer.worst:
                layer.worst, layer.worst_step = one["most"], step

    def _make_room(self) -> None:
        if len(self.spans) >= self.room:
            joined = self.fitted((self.room + 1) // 2)
            self.spans, self.layers, self._length = joined.spans, joined.layers, 2 * self._length

    def _close(self) -> None:
        """The last column may have no counts, as few steps are in it."""
        if len(self.spans) > 1 and any(layer.columns[-1].counts is None for layer in self.layers):
            self.spans[-2:] = [(self.spans[-2][0], self.spans[-1][1])]
            for layer in self.layers:
                layer.columns[-2:] = [layer.columns[-2].joined(layer.columns[-1])]

    def fitted(self, room: int) -> History:
        """The same in at most so many columns."""
        each = -(-len(self.spans) // max(1, room))
        if each <= 1:
            return self
        starts = range(0, len(self.spans), each)
        spans = [(self.spans[at][0], self.spans[at : at + each][-1][1]) for at in starts]
        layers = []
        for layer in self.layers:
            parts = [Layer(layer.name, layer.columns[at : at + each]).total() for at in starts]
            layers.append(Layer(layer.name, parts, layer.last, layer.worst, layer.worst_step))
        return History(name=self.name, layers=layers, spans=spans, room=self.room)

    @property
    def steps(self) -> tuple[int, int]:
        return self.spans[0][0], self.spans[-1][1]

    def heading(self) -> str:
        first, last = self.steps
        layers, experts = len(self.layers), max(layer.experts for layer in self.layers)
        words = f"{layers} layer{'s' * (layers > 1)} of {experts} experts, steps {first:,} to {last:,}"
        length = self.spans[0][1] - self.spans[0][0] + 1
        return words + (f", {length} to a column" if length > 1 else "")

    def worst(self, most: int) -> list[Layer]:
        """The layers whose busiest experts are furthest above the mean, in the model's order.

        Only the second half of the steps counts: at first every router is uneven.
        """
        chosen = sorted(self.layers, key=lambda layer: layer.late(), reverse=True)[:most]
        names = {layer.name for layer in chosen}
        return [layer for layer in self.layers if layer.name in names]

    def facts(self) -> dict[str, Any]:
        """For `--json`: what each layer came to."""
        return {
            "steps": list(self.steps),
            "layers": [
                {
                    **{name: value for name, value in layer.last.items() if name != "counts"},
                    "worst": layer.worst,
                    "worst_step": layer.worst_step,
                    "never": layer.never(),
                    "dropped_in_run": layer.total().dropped,
                    "assigned_in_run": layer.total().assigned,
                }
                for layer in self.layers
            ],
        }
