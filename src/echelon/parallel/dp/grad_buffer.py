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

from echelon.kernels.gemm.fused_linear import ComputeGradient
from echelon.layout.placement import LogicalParam

if TYPE_CHECKING:
    from echelon.parallel.dp.param_group import ParamGroup
    from echelon.parallel.dp.sharded_model import ShardedModel


class ParamGradHook:
    """One parameter's place in a flat unit."""

    def __init__(self, sharded_model: ShardedModel, group: ParamGroup, param: LogicalParam):
        self.param = param
        self._sharded_model, self._group = weakref.ref(sharded_model), weakref.ref(group)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter, or one out of a file, has no home."""
        return type(None), ()

    def attach(self, parameter: nn.Parameter) -> None:
        """Makes this the parameter's home."""
        parameter.home = self  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(self._on_autograd_grad)

    @property
    def version(self) -> int:
        """Grows whenever the parameter's values change."""
        unit = self._group()
        return -1 if unit is None else unit.version

    @torch.no_grad()
    def receive(self, parameters: Sequence[Tensor], product: ComputeGradient) -> None:
        """The gradients of matrices [out_i, in] that lie side by side, from the backward of a function they went into.

        `product(place)` writes them into `place`, one below the other, and `product(None)` into a new tensor: the place
        is theirs in the unit's buffer, where nothing is to be added, multiplied or cast.
        """
        unit, place = self._group(), None
        if unit is not None:
            homes = [getattr(parameter, "home", None) for parameter in parameters]
            entries = [home.param for home in homes if home is not None and home._group() is unit]
            place = unit.claim_grad_view(entries) if len(entries) == len(homes) else None
        if place is not None:
            product(place)
        else:
            parts = product(None).split([len(parameter) for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.requires_grad:
                    grad_hook_of(parameter)._accumulate(parameter, part)
        if (flat := self._sharded_model()) is not None:
            flat.on_grad()

    def add_deferred_grad(self, left: Tensor, right: Tensor) -> None:
        """The gradient left x right, after the backward pass that it was put off from."""
        unit, flat = self._group(), self._sharded_model()
        assert unit is not None
        assert flat is not None
        unit.accumulate_matmul_grad(self.param, left, right)
        if unit.mark_param_ready():
            flat.on_grads_ready(unit)

    def _on_autograd_grad(self, parameter: Tensor) -> None:
        unit, flat = self._group(), self._sharded_model()
        if unit is None or flat is None:
            return
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            unit.accumulate_grad(self.param, gradient)
        if unit.mark_param_ready():
            flat.on_grads_ready(unit)
        flat.on_grad()

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        unit = self._group()
        if unit is not None:
            unit.accumulate_grad(self.param, gradient)
        else:  # the flat units are gone, the model is not: what autograd would do
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def grad_hook_of(parameter: Tensor) -> ParamGradHook:
    home = parameter.home  # type: ignore[attr-defined]
    assert isinstance(home, ParamGradHook)
    return home
