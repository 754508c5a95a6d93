"""`GradBuffer`: where backward accumulates a parameter group's gradients, before they are reduced.

[Note: lazy gradients]

When backward begins, all activations are there and no gradient; when it ends, it is the other way round. So on a GPU,
where memory is scarce and quickly allocated, the buffer is allocated when the first gradient of a step arrives, and
freed when the optimizer has used it. On a CPU fresh memory costs a page fault per page, so there it stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.layout.placement import LogicalParam, ParamGroupSpec


class GradBuffer:
    """The unsharded gradients of one parameter group: each is written (first) or added (later) into its view."""

    def __init__(self, spec: ParamGroupSpec, dtype: torch.dtype, unsharded_param: Tensor):
        self.spec, self.dtype = spec, dtype
        self.device, self._param_dtype = unsharded_param.device, unsharded_param.dtype
        self.lazy = unsharded_param.is_cuda
        """allocated from the first gradient of a step until `free`: see [Note: lazy gradients]"""
        self.tensor: Tensor | None = None
        self.scale = 1.0
        """factor of arriving gradients"""
        self._views: dict[str, Tensor] = {}
        self._written: set[str] = set()
        self._num_ready = 0
        self._num_params = len(spec.params) if spec.trainable else 0

    def allocated(self) -> Tensor:
        """Return the buffer; allocate it if it is not there."""
        if self.tensor is None:
            numel = self.spec.num_shards * self.spec.shard_numel
            self.tensor = torch.empty(numel, dtype=self.dtype, device=self.device)
            self.tensor[self.spec.numel :].zero_()  # padding: never written
        return self.tensor

    def free(self) -> None:
        self.tensor = None
        self._views.clear()

    def hand_over(self) -> Tensor:
        """Return the buffer and forget it: later gradients go to a new one."""
        buffer = self.allocated()
        self.free()
        self._written.clear()
        return buffer

    def begin_step(self) -> None:
        self._written.clear()

    def begin_microbatch(self) -> None:
        self._num_ready = 0

    # -- arriving gradients -------------------------------------------------------------------------------------------

    def accumulate(self, param: LogicalParam, grad: Tensor) -> None:
        """Write or add one parameter's gradient."""
        view = self.view(param)
        if param.name in self._written:
            view.add_(grad, alpha=self.scale)
        elif self.scale == 1.0:
            view.copy_(grad)
        else:
            view.copy_(grad).mul_(self.scale)
        self._written.add(param.name)

    def accumulate_matmul(self, param: LogicalParam, left: Tensor, right: Tensor) -> None:
        """Accumulate the gradient left x right; if dtypes agree, the GEMM writes into the view."""
        view = self.view(param)
        if view.dtype != left.dtype:
            self.accumulate(param, left @ right)
            return
        torch.addmm(view, left, right, beta=float(param.name in self._written), alpha=self.scale, out=view)
        self._written.add(param.name)

    def claim_view(self, params: Sequence[LogicalParam]) -> Tensor | None:
        """Return where the gradients of matrices are to be written, one below the other: they count as written.

        None if writing is not enough: the matrices are not adjacent, one has a gradient already, or a gradient must be
        cast or scaled.
        """
        if self.scale != 1.0 or self.dtype != self._param_dtype:
            return None
        if len(params) == 1 and params[0].name not in self._written:
            self._written.add(params[0].name)
            return self.view(params[0])
        start, width = self.spec.offsets[params[0].name], params[0].local_shape[1:]
        end = start
        for param in params:
            is_apart = self.spec.offsets[param.name] != end or param.local_shape[1:] != width
            if is_apart or param.name in self._written:
                return None
            end += param.local_numel
        self._written.update(param.name for param in params)
        return self.allocated()[start:end].view(-1, *width)

    def view(self, param: LogicalParam) -> Tensor:
        """Return this rank's gradient of a parameter, until it is reduced."""
        view = self._views.get(param.name)
        if view is None:
            offset = self.spec.offsets[param.name]
            view = self.allocated()[offset : offset + param.local_numel].view(param.local_shape)
            self._views[param.name] = view
        return view

    def zero_missing(self) -> None:
        """Zero the gradients that did not arrive."""
        for param in self.spec.params if len(self._written) < self._num_params else ():
            if param.name not in self._written:
                self.view(param).zero_()

    def mark_param_ready(self) -> bool:
        """Count a parameter whose gradients of this microbatch are complete; return whether all are."""
        self._num_ready += 1
        return self.is_ready

    @property
    def is_ready(self) -> bool:
        """All gradients of the current microbatch have arrived."""
        return self._num_ready == self._num_params
