"""Whose gradient was not finite: the first parameter of the backward pass, and the ranks that hold it.

Where the loss was not finite, the first output of the forward pass that was not (first_output.py) says more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon.moe.experts import Experts
from echelon.parallel.apply import WORLD, Parallel
from echelon.training.grad_norm import Part


class Output(NamedTuple):
    """The first output of the forward pass that was not finite."""

    module: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """What was not finite in a step."""

    name: str
    """of the first parameter of the backward pass whose gradient was not; empty where only the loss was not"""
    ranks: tuple[int, ...]
    """that hold such a gradient of it"""
    at: tuple[tuple[str, int], ...]
    """the place of the first of these ranks on the mesh"""
    summed: bool
    """what they hold is a sum over data-parallel ranks, of which any may have brought it"""
    loss: bool
    """the loss was not finite either"""
    output: Output | None = None
    """where that began"""

    @property
    def layer(self) -> str:
        """Where it began: the module whose output was not finite, or which holds the parameter."""
        return self.output.module if self.output is not None else self.name.rpartition(".")[0] or self.name

    def record(self) -> dict[str, Any]:
        """For the log."""
        return {
            "parameter": self.name,
            "layer": self.layer,
            "ranks": list(self.ranks),
            "at": dict(self.at),
            "summed": self.summed,
            "loss": self.loss,
            "output": None if self.output is None else {"module": self.output.module, "ranks": list(self.output.ranks)},
        }

    def __str__(self) -> str:
        return self._told + (self._began if self.output is not None else "")

    @property
    def _began(self) -> str:
        assert self.output is not None
        ranks = self.output.ranks
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"; the first output that is not finite is that of {self.output.module}, on rank {ranks[0]}{others}"

    @property
    def _told(self) -> str:
        if not self.name:
            return "loss not finite"
        place = ", ".join(f"{axis} {index}" for axis, index in self.at)
        where = f"rank {self.ranks[0]}" + (f" ({place})" if place else "")
        others = len(self.ranks) - 1
        where += f" and {others} more" if others else ""
        summed = f", which hold{'' if others else 's'} its sum over data-parallel ranks" if self.summed else ""
        return f"{'loss and ' if self.loss else ''}gradient of {self.name} not finite on {where}{summed}"


class Blame:
    """Who finds it. The order of a model's parameters stands for the order of its forward pass."""

    def __init__(self, model: nn.Module):
        """Of the whole model, before ranks take their parts of it."""
        first: dict[int, str] = {}
        found: dict[str, int] = {}
        for place, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
            # A tied weight stands where it is used last: its gradient begins there.
            found[first.setdefault(id(parameter), name)] = place
        self.names = sorted(found, key=lambda name: found[name])
        self.modules = list(_in_order(model))
        """in the order in which they are through with a forward pass"""
        mixtures = [name for name, module in model.named_modules() if isinstance(module, Experts)]
        self.experts = {name for name in self.names if name.rpartition(".")[0] in mixtures}

    def find(self, parallel: Parallel, parts: Sequence[Part], norms: Sequence[float], *, loss: bool) -> NotFinite:
        """All ranks tell each other what they found: every rank must call it, with the norms of its own parts."""
        bad = {part.name for part, norm in zip(parts, norms, strict=True) if not math.isfinite(norm)}
        axis = parallel.axes[WORLD]
        told = torch.zeros(axis.size, dtype=torch.int64, device=parallel.options.device)
        told[axis.index] = 1 + max((self.names.index(name) for name in bad), default=-1)
        found = axis.all_reduce(told).tolist()
        if not any(found):
            return NotFinite(name="", ranks=(), at=(), summed=False, loss=loss)
        ranks = tuple(axis.ranks[place] for place, number in enumerate(found) if number == max(found))
        layout, at = parallel.layout, parallel.axes.mesh.coordinates(ranks[0])
        degrees = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        places = tuple((name, at[name]) for name, degree in degrees.items() if degree > 1)
        name, folded = self.names[max(found) - 1], layout.ep * layout.etp
        copies = layout.dp * layout.cp * layout.tp // folded if name in self.experts else layout.dp * layout.cp
        return NotFinite(name=name, ranks=ranks, at=places, summed=copies > 1, loss=loss)


def _in_order(module: nn.Module, name: str = "") -> Iterator[str]:
    """Names of modules: those that are in one before it."""
    for child, inside in module.named_children():
        yield from _in_order(inside, f"{name}.{child}" if name else child)
    if name:
        yield name
