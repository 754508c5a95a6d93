"""Where a parameter's gradient goes, found from the parameter: `parameter.home`.

[Note: two ways home]

Autograd comes by a parameter once in a backward pass, when all of its uses are through, and hands over what it added up
(`_from_autograd`). A function of ours can do without that tensor: its backward returns no gradient for the parameter,
and writes it straight into its place with `receive`, as often as the parameter was used. Autograd still comes by, with
empty hands: only then are the parameter's gradients all there. Both may happen in one pass, as with a tied head and
embedding.

[Note: weak references]

Python's collector does not see that a parameter holds its hooks, so a hook that held the unit, which holds the
parameter, would keep the whole model and its process groups for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.kernels.gemm.fused_linear import Product
from echelon.layout.placement import Entry

if TYPE_CHECKING:
    from echelon.parallel.dp.param_group import FlatUnit
    from echelon.parallel.dp.sharded_model import Flat


class Home:
    """One parameter's place in a flat unit."""

    def __init__(self, flat: Flat, unit: FlatUnit, entry: Entry):
        self.entry = entry
        self._flat, self._unit = weakref.ref(flat), weakref.ref(unit)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter, or one out of a file, has no home."""
        return type(None), ()

    def of(self, parameter: nn.Parameter) -> None:
        """Makes this the parameter's home."""
        parameter.home = self  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(self._from_autograd)

    @property
    def version(self) -> int:
        """Grows whenever the parameter's values change."""
        unit = self._unit()
        return -1 if unit is None else unit.version

    @torch.no_grad()
    def receive(self, parameters: Sequence[Tensor], product: Product) -> None:
        """The gradients of matrices [out_i, in] that lie side by side, from the backward of a function they went into.

        `product(place)` writes them into `place`, one below the other, and `product(None)` into a new tensor: the place
        is theirs in the unit's buffer, where nothing is to be added, multiplied or cast.
        """
        unit, place = self._unit(), None
        if unit is not None:
            homes = [getattr(parameter, "home", None) for parameter in parameters]
            entries = [home.entry for home in homes if home is not None and home._unit() is unit]
            place = unit.place_to_write(entries) if len(entries) == len(homes) else None
        if place is not None:
            product(place)
        else:
            parts = product(None).split([len(parameter) for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.requires_grad:
                    home_of(parameter)._take(parameter, part)
        if (flat := self._flat()) is not None:
            flat.on_gradient()

    def deliver(self, left: Tensor, right: Tensor) -> None:
        """The gradient left x right, after the backward pass that it was put off from."""
        unit, flat = self._unit(), self._flat()
        assert unit is not None
        assert flat is not None
        unit.arrive_product(self.entry, left, right)
        if unit.note():
            flat.complete(unit)

    def _from_autograd(self, parameter: Tensor) -> None:
        unit, flat = self._unit(), self._flat()
        if unit is None or flat is None:
            return
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            unit.arrive(self.entry, gradient)
        if unit.note():
            flat.complete(unit)
        flat.on_gradient()

    def _take(self, parameter: Tensor, gradient: Tensor) -> None:
        unit = self._unit()
        if unit is not None:
            unit.arrive(self.entry, gradient)
        else:  # the flat units are gone, the model is not: what autograd would do
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def home_of(parameter: Tensor) -> Home:
    home = parameter.home  # type: ignore[attr-defined]
    assert isinstance(home, Home)
    return home
