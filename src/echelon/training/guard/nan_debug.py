"""Whose gradient was not finite: the first parameter of the backward pass, and the ranks that hold it.

Where the loss was not finite, the first output of the forward pass that was not (first_output.py) says more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.moe.experts import Experts
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.parallel_model import ParallelModel
from echelon.training.batch_sharding import Microbatch
from echelon.training.grad_norm import GradientSlice
from echelon.training.guard.module_outputs import watch_outputs
from echelon.training.guard.replay_check import StepSnapshot

if TYPE_CHECKING:
    from echelon.training.engine import Engine


class NonfiniteOutput(NamedTuple):
    """The first output of the forward pass that was not finite."""

    module: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NonfiniteReport:
    """What was not finite in a step."""

    parameter: str
    """of the first parameter of the backward pass whose gradient was not; empty where only the loss was not"""
    ranks: tuple[int, ...]
    """that hold such a gradient of it"""
    coordinates: tuple[tuple[str, int], ...]
    """the place of the first of these ranks on the mesh"""
    is_reduced: bool
    """what they hold is a sum over data-parallel ranks, of which any may have brought it"""
    loss_is_nonfinite: bool
    """the loss was not finite either"""
    output: NonfiniteOutput | None = None
    """where that began"""

    @property
    def layer(self) -> str:
        """Where it began: the module whose output was not finite, or which holds the parameter."""
        return self.output.module if self.output is not None else self.parameter.rpartition(".")[0] or self.parameter

    def record(self) -> dict[str, Any]:
        """For the log."""
        return {
            "parameter": self.parameter,
            "layer": self.layer,
            "ranks": list(self.ranks),
            "at": dict(self.coordinates),
            "summed": self.is_reduced,
            "loss": self.loss_is_nonfinite,
            "output": None if self.output is None else {"module": self.output.module, "ranks": list(self.output.ranks)},
        }

    def __str__(self) -> str:
        return self._gradient_text + (self._output_text if self.output is not None else "")

    @property
    def _output_text(self) -> str:
        assert self.output is not None
        ranks = self.output.ranks
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"; the first output that is not finite is that of {self.output.module}, on rank {ranks[0]}{others}"

    @property
    def _gradient_text(self) -> str:
        if not self.parameter:
            return "loss not finite"
        place = ", ".join(f"{axis} {index}" for axis, index in self.coordinates)
        where = f"rank {self.ranks[0]}" + (f" ({place})" if place else "")
        others = len(self.ranks) - 1
        where += f" and {others} more" if others else ""
        summed = f", which hold{'' if others else 's'} its sum over data-parallel ranks" if self.is_reduced else ""
        return (
            f"{'loss and ' if self.loss_is_nonfinite else ''}gradient of {self.parameter} not finite on {where}{summed}"
        )


class NonfiniteLocator:
    """Who finds it. The order of a model's parameters stands for the order of its forward pass."""

    def __init__(self, model: nn.Module):
        """Of the whole model, before ranks take their parts of it."""
        first: dict[int, str] = {}
        found: dict[str, int] = {}
        for place, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
            # A tied weight stands where it is used last: its gradient begins there.
            found[first.setdefault(id(parameter), name)] = place
        self.param_names = sorted(found, key=lambda name: found[name])
        self.modules = list(_forward_order(model))
        """in the order in which they are through with a forward pass"""
        mixtures = [name for name, module in model.named_modules() if isinstance(module, Experts)]
        self.expert_params = {name for name in self.param_names if name.rpartition(".")[0] in mixtures}

    def locate(
        self,
        parallel: ParallelModel,
        slices: Sequence[GradientSlice],
        norms: Sequence[float],
        *,
        loss_is_nonfinite: bool,
    ) -> NonfiniteReport:
        """All ranks tell each other what they found: every rank must call it, with the norms of its own parts."""
        bad = {part.name for part, norm in zip(slices, norms, strict=True) if not math.isfinite(norm)}
        axis = parallel.axes[WORLD_AXIS]
        told = torch.zeros(axis.size, dtype=torch.int64, device=parallel.options.device)
        told[axis.index] = 1 + max((self.param_names.index(name) for name in bad), default=-1)
        found = axis.all_reduce(told).tolist()
        if not any(found):
            return NonfiniteReport(
                parameter="", ranks=(), coordinates=(), is_reduced=False, loss_is_nonfinite=loss_is_nonfinite
            )
        ranks = tuple(axis.ranks[place] for place, number in enumerate(found) if number == max(found))
        layout, at = parallel.layout, parallel.axes.mesh.coordinates(ranks[0])
        degrees = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        places = tuple((name, at[name]) for name, degree in degrees.items() if degree > 1)
        name, folded = self.param_names[max(found) - 1], layout.ep * layout.etp
        copies = layout.dp * layout.cp * layout.tp // folded if name in self.expert_params else layout.dp * layout.cp
        return NonfiniteReport(
            parameter=name, ranks=ranks, coordinates=places, is_reduced=copies > 1, loss_is_nonfinite=loss_is_nonfinite
        )


def _forward_order(module: nn.Module, name: str = "") -> Iterator[str]:
    """Names of modules: those that are in one before it."""
    for child, inside in module.named_children():
        yield from _forward_order(inside, f"{name}.{child}" if name else child)
    if name:
        yield name


def first_nonfinite_output(engine: Engine, microbatches: Iterable[Microbatch]) -> NonfiniteOutput | None:
    """All ranks must ask, for their own microbatches of a step; none where every output is finite."""
    names: list[str] = []
    good: list[Tensor] = []

    def see(name: str, value: Tensor) -> None:
        names.append(name)
        good.append(torch.isfinite(value).all())

    before = StepSnapshot(engine)
    with watch_outputs(engine.model, see):
        engine.forward_only(microbatches)
    before.restore()
    bad = [name for name, fine in zip(names, torch.stack(good).tolist() if good else (), strict=True) if not fine]
    axis, order = engine.parallel.axes[WORLD_AXIS], engine.nonfinite_locator.modules
    told = torch.zeros(axis.size, dtype=torch.int64, device=engine.parallel.options.device)
    told[axis.index] = len(order) - order.index(bad[0]) if bad else 0
    found = axis.all_reduce(told).tolist()
    if not any(found):
        return None
    # Later modules have smaller numbers, and what they give follows from what they are given.
    ranks = tuple(axis.ranks[place] for place, number in enumerate(found) if number == max(found))
    return NonfiniteOutput(order[len(order) - max(found)], ranks)
