"""`ParamGradHook`: writes a parameter's gradient into its group's buffer; a parameter holds it as `grad_hook`.

[Note: two ways into the buffer]

Autograd calls a parameter's hook once in a backward pass, when all of its uses are done, with the accumulated gradient
(`_on_autograd_grad`). A function of ours can avoid that tensor: its backward returns no gradient for the parameter, and
writes it straight into the buffer with `receive`, once per use. Autograd still calls the hook, without a gradient: only
then are the parameter's gradients complete. Both may happen in one pass, as with a tied head and embedding.

[Note: weak references]

Python's garbage collector does not see that a parameter holds its hooks, so a hook that held the group, which holds the
parameter, would keep the model and its process groups alive forever.
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
    """The gradient hook of one parameter of a group."""

    def __init__(self, sharded_model: ShardedModel, group: ParamGroup, param: LogicalParam):
        self.param = param
        self._sharded_model, self._group = weakref.ref(sharded_model), weakref.ref(group)

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop the hook from a copied or unpickled parameter."""
        return type(None), ()

    def attach(self, parameter: nn.Parameter) -> None:
        parameter.grad_hook = self  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(self._on_autograd_grad)

    @property
    def version(self) -> int:
        """Grows whenever the parameter's values change."""
        group = self._group()
        return -1 if group is None else group.version

    @torch.no_grad()
    def receive(self, parameters: Sequence[Tensor], matmul: ComputeGradient) -> None:
        """Accumulate the gradients of adjacent matrices [out_i, in], from the backward of a function that used them.

        `matmul(out)` writes them into `out`, one below the other, and `matmul(None)` into a new tensor: `out` is their
        view of the buffer, if nothing is to be added, scaled or cast.
        """
        group, place = self._group(), None
        if group is not None:
            hooks = [getattr(parameter, "grad_hook", None) for parameter in parameters]
            entries = [hook.param for hook in hooks if hook is not None and hook._group() is group]
            place = group.grads.claim_view(entries) if len(entries) == len(hooks) else None
        if place is not None:
            matmul(place)
        else:
            parts = matmul(None).split([len(parameter) for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.requires_grad:
                    grad_hook_of(parameter)._accumulate(parameter, part)
        if (model := self._sharded_model()) is not None:
            model.on_grad()

    def add_deferred_grad(self, left: Tensor, right: Tensor) -> None:
        """Accumulate the gradient left x right, deferred from an earlier backward pass."""
        group = self._group()
        assert group is not None
        group.grads.accumulate_matmul(self.param, left, right)
        self.mark_ready()

    def mark_ready(self) -> None:
        """Note that the gradients of a backward pass are complete."""
        group, sharded_model = self._group(), self._sharded_model()
        assert group is not None
        assert sharded_model is not None
        if group.grads.mark_param_ready():
            sharded_model.on_grads_ready(group)

    def _on_autograd_grad(self, parameter: Tensor) -> None:
        group, sharded_model = self._group(), self._sharded_model()
        if group is None or sharded_model is None:
            return
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            group.grads.accumulate(self.param, gradient)
        if group.grads.mark_param_ready():
            sharded_model.on_grads_ready(group)
        sharded_model.on_grad()

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        group = self._group()
        if group is not None:
            group.grads.accumulate(self.param, gradient)
        else:  # the groups are gone, the model is not: accumulate as autograd does
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def grad_hook_of(parameter: Tensor) -> ParamGradHook:
    hook = parameter.grad_hook  # type: ignore[attr-defined]
    assert isinstance(hook, ParamGradHook)
    return hook
