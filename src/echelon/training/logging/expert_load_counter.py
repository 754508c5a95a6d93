"""What the gates of a model decided in a step: how many tokens each expert got, over all ranks.

Ranks of cp and tp decide for whole sequences and so count the same; those of dp have other sequences, and stages other
layers. One sum over pp x dp tells everyone everything, once a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.layout import ASYNCHRONOUS
from echelon.moe.moe_layer import Mixture
from echelon.parallel.apply import Parallel
from echelon.parallel.comm.mesh_axis import Pending
from echelon.training.async_copy import later
from echelon.training.logging.expert_load import Load


def mixtures_of(model: nn.Module, layout: Layout) -> dict[str, int]:
    """The mixtures of a whole model and how many experts each has: to be asked before stages take their parts."""
    found = {name: part.gate for name, part in model.named_modules() if isinstance(part, Mixture)}
    by_load = [name for name, gate in found.items() if gate.balances_by_load]
    if by_load and layout.pp > 1 and layout.schedule in ASYNCHRONOUS:
        raise ValueError(
            f"a gate that balances by the loads of a step ({by_load[0]}.gate) has none in schedule={layout.schedule}, "
            "where stages are at different steps; use schedule=1f1b, or a gate with a balance loss"
        )
    return {name: gate.num_experts for name, gate in found.items()}


class Loads:
    """The mixtures of a model, on this rank and elsewhere."""

    def __init__(self, parallel: Parallel, mixtures: dict[str, int]):
        self.mixtures = mixtures
        self.here = {name: part for name, part in parallel.model.named_modules() if isinstance(part, Mixture)}
        self.width = max(mixtures.values(), default=0) + 1
        self.axis = parallel.axes.axis("pp*dp" if parallel.layout.pp > 1 else "dp") if mixtures else None
        self.device = parallel.options.device
        self.last: Tensor | None = None
        """[layers, E + 1] of the last step, on the device"""
        self._pending: Pending | None = None
        """of the last step, where nobody waited for it"""

    def end_step(self, live: Tensor) -> None:
        """After an update, or in its place where there is none (`live` is false). Every rank must call it."""
        if self.axis is None:
            return
        self.last = self.axis.all_reduce(self._table())
        for row, (name, experts) in enumerate(self.mixtures.items()):
            if name in self.here:
                self.here[name].end_step(self.last[row, :experts] * live)

    def end_window(self) -> None:
        """After a step of an asynchronous schedule, which stages end at different times: nobody waits for another."""
        if self.axis is None:
            return
        self.last = self._table()
        self._pending = self.axis.start_all_reduce(self.last)
        for part in self.here.values():
            part.tally = None  # gates that balance by loads are refused: see `mixtures_of`

    def _table(self) -> Tensor:
        table = torch.zeros(len(self.mixtures), self.width, dtype=torch.int64, device=self.device)
        for row, name in enumerate(self.mixtures):
            part = self.here.get(name)
            if part is not None and part.tally is not None:
                table[row, : len(part.tally) - 1] = part.tally[:-1]
                table[row, -1] = part.tally[-1]
        return table

    def ask(self) -> Callable[[], list[Load]]:
        """Asks for the loads of every layer in the step that has just been queued; who asks waits for it alone."""
        if self.last is None:
            return list
        last, pending = self.last.flatten(), self._pending
        if pending is not None and last.is_cuda:
            pending.wait()  # of the device, not of the host
        told = later(last)

        def ask() -> list[Load]:
            if pending is not None and not last.is_cuda:
                pending.wait()
            return self._loads([int(value) for value in told()])

        return ask

    def _loads(self, table: list[int]) -> list[Load]:
        found = []
        for row, (name, experts) in enumerate(self.mixtures.items()):
            *counts, dropped = table[row * self.width : (row + 1) * self.width]
            found.append(Load.of(name, counts[:experts], dropped))
        return found

    def collectives(self) -> list[Collective]:
        if self.axis is None or self.axis.size == 1:
            return []
        size = len(self.mixtures) * self.width * 8
        return [Collective(kind="all_reduce", axis=self.axis.name, bytes=size, part="loads of experts")]
