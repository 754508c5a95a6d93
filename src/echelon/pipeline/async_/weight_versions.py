"""Weight stashing: older versions of a stage's weights for the microbatches that still need them.

An update writes the master weights. If the current version is stashed, the new version gets parameter buffers of its
own, and the autograd graphs that were built on the old ones keep them alive; otherwise the update refills the buffers
in place. A forward on an older version runs with that version's parameters in the modules. The gradients of all
versions add up in one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from echelon.parallel.dp.sharded_model import ShardedModel
from echelon.pipeline.actions import LATEST

GroupParameters = list[dict[str, nn.Parameter]]
"""the parameters of every parameter group, by name"""


class WeightVersions:
    """The versions of one stage's weights that are alive."""

    def __init__(self, sharded_model: ShardedModel):
        self.sharded_model = sharded_model
        self.latest = 0
        self.stashed: dict[int, GroupParameters] = {}

    def stash(self, version: int) -> None:
        assert version == self.latest
        for group in self.sharded_model.param_groups:
            group.unshard()
        self.stashed[version] = [group.parameters for group in self.sharded_model.param_groups]

    def drop(self, version: int) -> None:
        del self.stashed[version]

    def advance(self, version: int) -> None:
        """Make the weights that the optimizer has just written the latest version."""
        assert version == self.latest + 1
        if self.latest in self.stashed:
            for group in self.sharded_model.trainable_groups:
                group.fork_param_buffer()
                self.sharded_model.register_params(group)
        self.sharded_model.after_update()
        self.latest = version

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Put this version's parameters into the modules for the time of the context."""
        if version in (LATEST, self.latest):
            yield
            return
        current = [group.parameters for group in self.sharded_model.param_groups]
        self.sharded_model.swap_params(self.stashed[version])
        try:
            yield
        finally:
            self.sharded_model.swap_params(current)
