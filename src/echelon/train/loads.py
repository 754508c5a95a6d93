"""What the gates of a model decided in a step: how many tokens each expert got, over all ranks.

Ranks of cp and tp decide for whole sequences and so count the same; those of dp have other sequences, and stages other
layers. One sum over pp x dp tells everyone everything, once a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.layout.cost import Collective
from echelon.models.sizes import ModelConfig
from echelon.moe.layer import Mixture
from echelon.parallel.apply import Parallel
from echelon.train.later import later
from echelon.train.load import Load


class Loads:
    """The mixtures of a model, on this rank and elsewhere."""

    def __init__(self, parallel: Parallel):
        self.here = {name: part for name, part in parallel.model.named_modules() if isinstance(part, Mixture)}
        config = getattr(parallel.model, "config", None)
        self.names = list(self.here)
        if isinstance(config, ModelConfig) and config.mixture is not None:
            self.names = [f"blocks.{i}.mlp" for i in range(config.layers) if config.mixture.is_mixture(i)]
            self.experts = config.mixture.experts
        else:
            self.experts = max((part.gate.num_experts for part in self.here.values()), default=0)
        self.axis = parallel.axes["pp*dp" if parallel.layout.pp > 1 else "dp"] if self.names else None
        self.device = parallel.options.device
        self.last: Tensor | None = None
        """[layers, E + 1] of the last step, on the device"""

    def end_step(self) -> None:
        """After an update. Every rank must call it."""
        if self.axis is None:
            return
        table = torch.zeros(len(self.names), self.experts + 1, dtype=torch.int64, device=self.device)
        for row, name in enumerate(self.names):
            part = self.here.get(name)
            if part is not None and part.tally is not None:
                table[row, : len(part.tally) - 1] = part.tally[:-1]
                table[row, -1] = part.tally[-1]
        self.last = self.axis.all_reduce(table)
        for row, name in enumerate(self.names):
            if name in self.here:
                part = self.here[name]
                part.tally = torch.cat([self.last[row, : part.gate.num_experts], self.last[row, -1:]])
                part.end_step()

    def ask(self) -> Callable[[], list[Load]]:
        """Asks for the loads of every layer in the step that has just been queued; who asks waits for it alone."""
        if self.last is None:
            return list
        told = later(self.last.flatten())
        return lambda: self._loads([int(value) for value in told()])

    def _loads(self, table: list[int]) -> list[Load]:
        found, width = [], self.experts + 1
        for row, name in enumerate(self.names):
            *counts, dropped = table[row * width : (row + 1) * width]
            # A layer elsewhere is of a model whose layers are alike.
            experts = self.here[name].gate.num_experts if name in self.here else self.experts
            found.append(Load.of(name, counts[:experts], dropped))
        return found

    def collectives(self) -> list[Collective]:
        if self.axis is None or self.axis.size == 1:
            return []
        size = len(self.names) * (self.experts + 1) * 8
        return [Collective(kind="all_reduce", axis=self.axis.name, bytes=size, part="loads of experts")]
