"""NaN debugging: which gradient, or which module output, was the first that is not finite, and on which ranks.

The gradient norm shows the first parameter of the backward pass whose gradient is not finite. Where the loss is not
finite either, `first_nonfinite_output` finds the module of the forward pass where it began: the step has updated
nothing, so its forward pass runs again with the same weights, samples and random numbers, and every output is checked.
Where results are read one step late, the next step may have moved the weights; nearly always the outcome is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.moe.experts import Experts
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.parallel_model import ParallelModel
from echelon.parallel.regional_compile import layers_as_written
from echelon.training.batch_sharding import Microbatch
from echelon.training.guard.module_outputs import watch_outputs
from echelon.training.guard.replay_check import StepSnapshot
from echelon.training.step_result import StepResult

if TYPE_CHECKING:
    from echelon.training.engine import Engine


class NonfiniteOutput(NamedTuple):
    """The first module of the forward pass whose output is not finite."""

    module: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NonfiniteReport:
    """The loss or gradients of a step that are not finite."""

    loss_is_nonfinite: bool
    parameter: str = ""
    """first parameter of the backward pass whose gradient is not finite; empty where only the loss is not"""
    ranks: tuple[int, ...] = ()
    """ranks that hold such a gradient"""
    coordinates: tuple[tuple[str, int], ...] = ()
    """mesh coordinates of the first of these ranks"""
    is_reduced: bool = False
    """whether the gradient is reduced over data-parallel ranks, any of which may have caused it"""
    output: NonfiniteOutput | None = None
    """where the loss became not finite"""

    @property
    def layer(self) -> str:
        """The module whose output is not finite, or which holds the parameter."""
        return self.output.module if self.output is not None else self.parameter.rpartition(".")[0] or self.parameter

    def record(self) -> dict[str, Any]:
        """Return the fields of the log record."""
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
        if self.output is None:
            return self._gradient_text
        module, (first, *others) = self.output
        where = f"rank {first}" + (f" and {len(others)} more" if others else "")
        return f"{self._gradient_text}; the first output that is not finite is that of {module}, on {where}"

    @property
    def _gradient_text(self) -> str:
        if not self.parameter:
            return "loss not finite"
        position = ", ".join(f"{axis} {index}" for axis, index in self.coordinates)
        where = f"rank {self.ranks[0]}" + (f" ({position})" if position else "")
        others = len(self.ranks) - 1
        where += f" and {others} more" if others else ""
        summed = f", which hold{'' if others else 's'} its sum over data-parallel ranks" if self.is_reduced else ""
        loss = "loss and " if self.loss_is_nonfinite else ""
        return f"{loss}gradient of {self.parameter} not finite on {where}{summed}"


class NonfiniteLocator:
    """Finds gradients that are not finite. The order of a model's parameters stands for that of its forward pass."""

    def __init__(self, model: nn.Module):
        """`model` is the full model, before ranks keep their parts of it."""
        first: dict[int, str] = {}
        last_use: dict[str, int] = {}
        for index, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
            # A tied weight counts where it is used last: its gradient begins there.
            last_use[first.setdefault(id(parameter), name)] = index
        self.param_names = sorted(last_use, key=lambda name: last_use[name])
        self.modules = list(_forward_order(model))
        """in the order in which they end their forward pass"""
        moe_layers = [name for name, module in model.named_modules() if isinstance(module, Experts)]
        self.expert_params = {name for name in self.param_names if name.rpartition(".")[0] in moe_layers}

    def locate(self, engine: Engine, result: StepResult) -> NonfiniteReport:
        """Locate the gradient of a step over all ranks: every rank must call it."""
        parallel, norms = engine.parallel, zip(engine.grad_norm.slices, result.read_norms(), strict=True)
        nonfinite = {part.name for part, norm in norms if not math.isfinite(norm)}
        loss_is_nonfinite = not math.isfinite(result.loss)
        mine = 1 + max((self.param_names.index(name) for name in nonfinite), default=-1)
        last, ranks = _highest_over_ranks(parallel, mine)
        if not last:
            return NonfiniteReport(loss_is_nonfinite=loss_is_nonfinite)
        layout, at = parallel.layout, parallel.axes.mesh.coordinates(ranks[0])
        degrees = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        coordinates = tuple((name, at[name]) for name, degree in degrees.items() if degree > 1)
        name, copies = self.param_names[last - 1], layout.dp * layout.cp
        if name in self.expert_params:
            copies = copies * layout.tp // (layout.ep * layout.etp)
        return NonfiniteReport(
            loss_is_nonfinite=loss_is_nonfinite,
            parameter=name,
            ranks=ranks,
            coordinates=coordinates,
            is_reduced=copies > 1,
        )


def _highest_over_ranks(parallel: ParallelModel, mine: int) -> tuple[int, tuple[int, ...]]:
    """Return the highest number of any rank, and the ranks that have it. Every rank must call it."""
    axis = parallel.axes[WORLD_AXIS]
    numbers = torch.zeros(axis.size, dtype=torch.int64, device=parallel.options.device)
    numbers[axis.index] = mine
    by_rank = axis.all_reduce(numbers).tolist()
    highest = max(by_rank)
    return highest, tuple(rank for rank, number in zip(axis.ranks, by_rank, strict=True) if number == highest)


def _forward_order(module: nn.Module, name: str = "") -> Iterator[str]:
    """Yield the names of modules, children before their parent."""
    for child, inside in module.named_children():
        yield from _forward_order(inside, f"{name}.{child}" if name else child)
    if name:
        yield name


def first_nonfinite_output(engine: Engine, microbatches: Iterable[Microbatch]) -> NonfiniteOutput | None:
    """Find it from this rank's microbatches of a step; all ranks must call it. None where every output is finite."""
    names: list[str] = []
    finite: list[Tensor] = []

    def check(name: str, value: Tensor) -> None:
        names.append(name)
        finite.append(torch.isfinite(value).all())

    snapshot = StepSnapshot(engine)
    with layers_as_written(), watch_outputs(engine.model, check):
        engine.forward_only(microbatches)
    snapshot.restore()
    flags = torch.stack(finite).tolist() if finite else ()
    nonfinite = [name for name, is_finite in zip(names, flags, strict=True) if not is_finite]
    order = engine.nonfinite_locator.modules
    # Later modules have smaller numbers, and their outputs follow from earlier ones.
    first, ranks = _highest_over_ranks(engine.parallel, len(order) - order.index(nonfinite[0]) if nonfinite else 0)
    return NonfiniteOutput(order[len(order) - first], ranks) if first else None
