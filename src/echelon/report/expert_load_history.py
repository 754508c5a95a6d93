"""The expert load of a run over its steps, read from its log as a stream, in bounded memory.

[Note: columns of steps]

A log may have a hundred thousand steps, a picture a hundred columns. A column is a number of consecutive steps: 1 at
first; when the columns are full, pairs are merged. A figure of a column is the mean over its steps; its loads are those
of all its steps together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any, Self

from echelon.training.run.run_dir import Run, RunError

RECORD_KIND = "experts"
"""of the log's lines"""
MAX_COLUMNS = 120
MAX_ALL_SHOWN, WORST_SHOWN = 8, 4
"""up to the first number of layers a picture shows all; of more, the worst ones"""


@dataclass
class LoadColumn:
    """The expert load of one layer over some steps."""

    steps: int
    max_over_mean: float
    """a sum over the steps, as are entropy and dead"""
    entropy: float
    dead: float
    dropped: int
    assigned: int
    counts: list[int] | None
    """tokens of each expert, over the steps that log them"""

    def merge(self, other: LoadColumn) -> LoadColumn:
        counts = self.counts or other.counts
        if self.counts is not None and other.counts is not None:
            counts = list(map(add, self.counts, other.counts))
        return LoadColumn(
            self.steps + other.steps,
            self.max_over_mean + other.max_over_mean,
            self.entropy + other.entropy,
            self.dead + other.dead,
            self.dropped + other.dropped,
            self.assigned + other.assigned,
            counts,
        )

    @property
    def relative_loads(self) -> list[float]:
        """The load of each expert relative to the mean."""
        if self.counts is None:
            return []
        mean = sum(self.counts) / len(self.counts)
        return [count / mean if mean else 0.0 for count in self.counts]

    @property
    def mean_figures(self) -> dict[str, float]:
        """max/mean, entropy, dead experts and dropped tokens of the average step."""
        dropped = 100 * self.dropped / self.assigned if self.assigned else 0.0
        sums = {"max/mean": self.max_over_mean, "entropy": self.entropy, "dead": self.dead}
        return {**{name: value / self.steps for name, value in sums.items()}, "dropped %": dropped}


@dataclass
class LayerLoadHistory:
    """The expert load of one layer over a run."""

    name: str
    columns: list[LoadColumn] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """the log's record of the last step"""
    worst_max_over_mean: float = 0.0
    """the highest max/mean of a step"""
    worst_step: int = 0

    @property
    def experts(self) -> int:
        return max((len(column.counts) for column in self.columns if column.counts), default=0)

    def merged_column(self) -> LoadColumn:
        first, *others = self.columns
        for other in others:
            first = first.merge(other)
        return first

    def late_max_over_mean(self) -> float:
        """The mean of max/mean over the second half of the steps."""
        half = self.columns[len(self.columns) // 2 :]
        return sum(column.max_over_mean for column in half) / sum(column.steps for column in half)

    def unused_experts(self) -> list[int]:
        """Experts without a token in all steps that log counts."""
        return [expert for expert, count in enumerate(self.merged_column().counts or ()) if not count]


@dataclass(kw_only=True)
class ExpertLoadHistory:
    """The expert load of a run: its layers in common columns; see [Note: columns of steps]."""

    name: str = ""
    layers: list[LayerLoadHistory] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """first and last step of every column"""
    max_columns: int = MAX_COLUMNS
    _column_length: int = 1
    _last_column_steps: int = 0
    """steps in the last column"""

    @classmethod
    def read(cls, folder: Path, max_columns: int = MAX_COLUMNS) -> Self:
        """Read a run's directory; no layers if it logged none. The run may have been killed, or still run."""
        if not (folder / "log.jsonl").is_file():
            return cls(name=folder.name)
        records = Run(path=folder).records(RECORD_KIND)
        return cls.from_records(records, name=folder.resolve().name, max_columns=max_columns)

    @classmethod
    def from_records(cls, records: Iterable[dict[str, Any]], *, name: str = "", max_columns: int = MAX_COLUMNS) -> Self:
        history = cls(name=name, max_columns=max_columns)
        for record in records:
            try:
                history.add(int(record["step"]), record["layers"])
            except (KeyError, TypeError, ValueError) as error:
                cause = f"{name}: {type(error).__name__}: {error}"
                raise RunError(f"the log's expert loads cannot be read ({cause})") from error
        history._merge_last_columns()
        return history

    def add(self, step: int, layers: list[dict[str, Any]]) -> None:
        if self.spans and step <= self.spans[-1][1]:
            return  # logged before
        columns = [
            LoadColumn(
                1, one["most"], one["entropy"], one["dead"], one["dropped"], one["assigned"], one.get("counts") or None
            )
            for one in layers
        ]
        self.layers = self.layers or [LayerLoadHistory(one["layer"]) for one in layers]
        if len(layers) != len(self.layers):
            raise ValueError(f"{len(layers)} layers, and {len(self.layers)} before")
        if 0 < self._last_column_steps < self._column_length:
            self.spans[-1] = self.spans[-1][0], step
            for layer, column in zip(self.layers, columns, strict=True):
                layer.columns[-1] = layer.columns[-1].merge(column)
        else:
            self._merge_pairs()
            self.spans.append((step, step))
            for layer, column in zip(self.layers, columns, strict=True):
                layer.columns.append(column)
            self._last_column_steps = 0
        self._last_column_steps += 1
        for layer, one in zip(self.layers, layers, strict=True):
            layer.last = one
            if one["most"] > layer.worst_max_over_mean:
                layer.worst_max_over_mean, layer.worst_step = one["most"], step

    def _merge_pairs(self) -> None:
        if len(self.spans) >= self.max_columns:
            joined = self.downsample((self.max_columns + 1) // 2)
            self.spans, self.layers, self._column_length = joined.spans, joined.layers, 2 * self._column_length

    def _merge_last_columns(self) -> None:
        """Merge the last two columns if the last one has no counts, as it may have few steps."""
        if len(self.spans) > 1 and any(layer.columns[-1].counts is None for layer in self.layers):
            self.spans[-2:] = [(self.spans[-2][0], self.spans[-1][1])]
            for layer in self.layers:
                layer.columns[-2:] = [layer.columns[-2].merge(layer.columns[-1])]

    def downsample(self, max_columns: int) -> ExpertLoadHistory:
        """The same in at most `max_columns` columns."""
        each = -(-len(self.spans) // max(1, max_columns))
        if each <= 1:
            return self
        starts = range(0, len(self.spans), each)
        spans = [(self.spans[at][0], self.spans[at : at + each][-1][1]) for at in starts]
        layers = []
        for layer in self.layers:
            parts = [LayerLoadHistory(layer.name, layer.columns[at : at + each]).merged_column() for at in starts]
            layers.append(LayerLoadHistory(layer.name, parts, layer.last, layer.worst_max_over_mean, layer.worst_step))
        return ExpertLoadHistory(name=self.name, layers=layers, spans=spans, max_columns=self.max_columns)

    @property
    def steps(self) -> tuple[int, int]:
        return self.spans[0][0], self.spans[-1][1]

    def heading(self) -> str:
        first, last = self.steps
        layers, experts = len(self.layers), max(layer.experts for layer in self.layers)
        words = f"{layers} layer{'s' * (layers > 1)} of {experts} experts, steps {first:,} to {last:,}"
        length = self.spans[0][1] - self.spans[0][0] + 1
        return words + (f", {length} to a column" if length > 1 else "")

    @property
    def title(self) -> str:
        return f"{self.name}: loads of experts" if self.name else "loads of experts"

    def shown_layers(self) -> list[LayerLoadHistory]:
        """The layers that a picture shows at first: all of a few, the worst of many."""
        return self.layers if len(self.layers) <= MAX_ALL_SHOWN else self.worst_layers(WORST_SHOWN)

    def worst_layers(self, count: int) -> list[LayerLoadHistory]:
        """The layers with the highest max/mean load, in the model's order.

        Only the second half of the steps counts: at first every router is unbalanced.
        """
        chosen = sorted(self.layers, key=lambda layer: layer.late_max_over_mean(), reverse=True)[:count]
        names = {layer.name for layer in chosen}
        return [layer for layer in self.layers if layer.name in names]

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`: the load balance of each layer."""
        return {
            "steps": list(self.steps),
            "layers": [
                {
                    **{name: value for name, value in layer.last.items() if name != "counts"},
                    "worst": layer.worst_max_over_mean,
                    "worst_step": layer.worst_step,
                    "never": layer.unused_experts(),
                    "dropped_in_run": layer.merged_column().dropped,
                    "assigned_in_run": layer.merged_column().assigned,
                }
                for layer in self.layers
            ],
        }
