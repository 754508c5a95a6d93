"""When a stage's flat units are gathered and reduced, with several microbatches under way at once.

    zero 0, 1   a unit's gradients add up over the step and are reduced after the last backward that adds to them
    zero 2, 3   they are reduced after every backward; sums may be cut anywhere, so it does not matter whose they are

Layers gather themselves (parallel/dp/sharded_model.py). What is kept is gathered before its first use and stays for the step. All
ranks of dp follow the same schedule, so they meet in the same order.
"""

from __future__ import annotations

from echelon.parallel.dp.param_group import FlatUnit
from echelon.parallel.dp.sharded_model import Flat


class Units:
    """The flat units of a rank's stages; `part` is the place of a stage among them."""

    def __init__(self, flat: Flat):
        self.flat = flat
        self._open: dict[int, set[int]] = {}

    def begin_step(self) -> None:
        for unit in self.flat.units:
            unit.begin_step()
        self._open = {
            number: {part for part, found in enumerate(self.flat.parts) if unit in found}
            for number, unit in enumerate(self.flat.units)
        }

    def ready(self, part: int) -> None:
        """Before a forward or backward: what the stage keeps is whole."""
        for unit in self.flat.parts[part]:
            if unit.unit.kept:
                unit.start_gather()
        for unit in self.flat.parts[part]:
            if unit.unit.kept or not unit.policy.free_parameters:
                unit.gather()

    def gather_layers(self, part: int) -> None:
        """Before a second half of backward that reads parameters: the layers' hooks do not see it."""
        for unit in self.flat.parts[part]:
            unit.gather()

    def begin_backward(self, part: int) -> None:
        for unit in self.flat.parts[part]:
            unit.begin_microbatch()

    def end_backward(self, part: int, *, last: bool) -> None:
        """After a backward whose gradients are all there. `last` is of the step."""
        for number, unit in reversed(list(enumerate(self.flat.units))):
            if unit not in self.flat.parts[part]:
                continue
            if last:
                self._open[number].discard(part)
            if unit.policy.scatter_every_microbatch:
                unit.settle(last=False)
                unit.start_reduce()
            elif not self._open[number]:
                unit.start_reduce()
        self.free_layers(part)

    def free_layers(self, part: int) -> None:
        for unit in self.flat.parts[part]:
            if not unit.unit.kept:
                unit.free()

    def finish(self) -> None:
        """At the step's end: every gradient is reduced, and what was kept for the step is freed."""
        for unit in self._in_order():
            unit.settle(last=True)
        for unit in self._in_order():
            unit.finish_reduce()
            unit.free()

    def _in_order(self) -> list[FlatUnit]:
        return self.flat.units[::-1]
