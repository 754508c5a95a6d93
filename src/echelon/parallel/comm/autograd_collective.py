"""`with_backward`: a collective as a differentiable function, whose backward is another collective.

tensor parallelism    identity and all-reduce, all-gather and reduce-scatter (tp/tp_collectives.py)
Ulysses               an all-to-all and its inverse (cp/ulysses.py)
token dispatch        start and finish of dispatch and combine (ep/token_all_to_all.py)
BatchNorm             an all-reduce and itself (dp/sync_batchnorm.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Exchange = Callable[[Tensor], Tensor]


def with_backward(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """Return `forward(x)`; in backward, `backward` maps the gradient of the result to that of x."""
    return _apply(x, forward, backward)


def keep_out_of_compiled_code() -> None:
    """Let `torch.compile` call collectives as they are: what records and counts them is no code to trace."""
    global _apply
    _apply = torch.compiler.disable(_exchange)


def _exchange(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    out: Tensor = _Collective.apply(x, forward, backward)
    return out


_apply = _exchange


class _Collective(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.exchange = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(gradients[0]), None, None
