"""The versions of a stage's weights, for schedules that update before every forward of the old weights is backward.

An update writes the optimizer's copy. Where the version in force is still needed, the new one gets buffers of its own,
and the old ones stay with the graphs that were built on them; otherwise they are refilled where they lie. A forward on
an older version runs with that version's parameters in the modules. Gradients of all versions arrive at one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from echelon.parallel.dp.sharded_model import Flat
from echelon.pipeline.actions import NEWEST

Parameters = list[dict[str, nn.Parameter]]
"""of every unit, by name"""


class Versions:
    def __init__(self, flat: Flat):
        self.flat = flat
        self.newest = 0
        self.kept: dict[int, Parameters] = {}

    def keep(self, version: int) -> None:
        assert version == self.newest
        for unit in self.flat.units:
            unit.gather()
        self.kept[version] = [unit.parameters for unit in self.flat.units]

    def drop(self, version: int) -> None:
        del self.kept[version]

    def updated(self, version: int) -> None:
        """The optimizer has written what is now this version."""
        assert version == self.newest + 1
        if self.newest in self.kept:
            for unit in self.flat.units:
                unit.fork()
                self.flat.put(unit)
        self.flat.updated()
        self.newest = version

    @contextmanager
    def use(self, version: int) -> Iterator[None]:
        """The modules hold this version's parameters."""
        if version in (NEWEST, self.newest):
            yield
            return
        now = [unit.parameters for unit in self.flat.units]
        self.flat.put_parameters(self.kept[version])
        try:
            yield
        finally:
            self.flat.put_parameters(now)
