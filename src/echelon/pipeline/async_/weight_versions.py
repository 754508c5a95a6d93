"""The versions of a stage's weights, for schedules that update before every forward of the old weights is backward.

An update writes the optimizer's copy. Where the version in force is still needed, the new one gets buffers of its own,
and the old ones stay with the graphs that were built on them; otherwise they are refilled where they lie. A forward on
an older version runs with that version's parameters in the modules. Gradients of all versions arrive at one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from echelon.parallel.dp.sharded_model import ShardedModel
from echelon.pipeline.actions import LATEST

GroupParameters = list[dict[str, nn.Parameter]]
"""of every unit, by name"""


class WeightVersions:
    def __init__(self, sharded_model: ShardedModel):
        self.sharded_model = sharded_model
        self.latest = 0
        self.stashed: dict[int, GroupParameters] = {}

    def stash(self, version: int) -> None:
        assert version == self.latest
        for unit in self.sharded_model.param_groups:
            unit.unshard()
        self.stashed[version] = [unit.parameters for unit in self.sharded_model.param_groups]

    def drop(self, version: int) -> None:
        del self.stashed[version]

    def advance(self, version: int) -> None:
        """The optimizer has written what is now this version."""
        assert version == self.latest + 1
        if self.latest in self.stashed:
            for unit in self.sharded_model.param_groups:
                unit.fork_param_buffer()
                self.sharded_model.register_params(unit)
        self.sharded_model.after_update()
        self.latest = version

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """The modules hold this version's parameters."""
        if version in (LATEST, self.latest):
            yield
            return
        now = [unit.parameters for unit in self.sharded_model.param_groups]
        self.sharded_model.swap_params(self.stashed[version])
        try:
            yield
        finally:
            self.sharded_model.swap_params(now)
