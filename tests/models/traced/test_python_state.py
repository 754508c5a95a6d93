"""Forwards that keep numbers in attributes: refused where they compute with them, accepted where they spare work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.models.traced.graph_model import make_traceable
from echelon.models.traced.graph_trace import UntraceableError


class Counts(nn.Module):
    """Warms up by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * min(self.calls / 10, 1.0)


class Switches(Counts):
    """Does something else in its first forward."""

    is_first = True

    def forward(self, x: Tensor) -> Tensor:
        self.is_first, before = False, self.is_first
        return x if before else self.linear(x)


class Table(Counts):
    """Keeps a table for the longest sequence so far, as a plain attribute."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.calls < len(x):
            self.calls, self.table = len(x), torch.arange(len(x), dtype=x.dtype).cos()
        return self.linear(x) * self.table[: len(x), None]


class TableBuffer(Counts):
    """The same as a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls < len(x):
            self.calls = len(x)
            self.register_buffer("table", torch.arange(len(x), dtype=x.dtype).cos(), persistent=False)
        return self.linear(x) * self.table[: len(x), None]


class Notes(Counts):
    """Leaves facts of its last forward for its user."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen, out = getattr(self, "seen", 0) + len(x), self.linear(x)
        self.norm = out.detach().norm()
        return out


class Inside(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part, nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.sum()


def traced(part: nn.Module) -> Any:
    return make_traceable(Inside(part), {"x": torch.zeros(6, 4)})


@pytest.mark.parametrize(("part", "attribute"), [(Counts, "calls"), (Switches, "is_first")])
def test_a_forward_that_computes_with_what_it_counts_is_refused(part: type[nn.Module], attribute: str) -> None:
    """A graph would have the count of its first call: every step after it would be wrong."""
    with pytest.raises(UntraceableError, match=f"Inside computes with attributes .*parts.0.{attribute}.*as buffers"):
        traced(part()).example_graph()


@pytest.mark.parametrize("part", [Table, TableBuffer, Notes])
def test_what_only_spares_work_is_traced(part: type[nn.Module]) -> None:
    model, like = traced(part()), Inside(part())
    like.load_state_dict(model.state_dict())
    model.runs_graph = True
    for rows in (6, 3, 9, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x=x), like(x=x))


def test_attributes_are_as_before_a_trace() -> None:
    model = traced(Table())
    model.example_graph()
    assert model.template.parts[0].calls == model.parts[0].calls == 0
    assert "seen" not in vars(traced(Notes()).template.parts[0])
