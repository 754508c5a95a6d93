"""Modules of a foreign model that get full sequences under context parallelism, where no core reaches other ranks.

[Note: what every rank computes]

    before    all-gather of the rank's tokens, in the sequence's order, without padding
    module    as on one device: every rank computes all of it
    after     each rank keeps its tokens

In backward a rank has gradients of its own tokens alone. So its gradients of the module's parameters are partial,
summed over cp as all are, and those of the input are reduce-scattered. Time and memory of the module do not fall with
cp; what lies between such modules does.

Under sequence parallelism a region's row divides the tokens over tp. There the rank's tokens are kept at the row's
input, so that tp divides these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models.foreign.layer_stack import HIDDEN, LayerStack
from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.cp.sequence_plan import is_hidden
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.parallel.tp.region_plan import ReducedLinear

if TYPE_CHECKING:
    from echelon.parallel.cp.context_parallel import ContextParallel


class SequenceGather:
    """One rank's full sequences, of its slices and those of the other cp ranks."""

    def __init__(self, context: ContextParallel, stack: LayerStack):
        self.context, self.layer_names, self.hidden_dims = context, stack.layer_names, 2 + len(stack.hidden_shape)
        self.inside = False
        """a gathered module runs: its tensors are of full sequences"""
        self.modules: list[str] = []
        """names of the modules that get them"""

    @property
    def length(self) -> int:
        return self.context.seq_len

    @property
    def local_length(self) -> int:
        return self.context.order.padded_len // self.context.axis.size

    def gather(self, x: Tensor) -> Tensor:
        """[sequences, this rank's tokens, ...] to [sequences, all tokens, ...]."""
        axis, order = self.context.axis, self.context.order

        def gather(x: Tensor) -> Tensor:
            return axis.all_gather(x).movedim(0, 1).flatten(1, 2).index_select(1, _places(order, axis, x.device)[1])

        def reduce(dy: Tensor) -> Tensor:
            padded = _pad_tokens(dy, order.padded_len).index_select(1, _places(order, axis, dy.device)[0])
            sent = padded.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
            local = torch.empty_like(sent[0])
            axis.start_reduce_scatter(local.view(-1), sent.view(-1)).wait()
            return local

        return with_backward(x, gather, reduce)

    def keep(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens, of a tensor whose dimension `dim` is all tokens; padding is zero."""
        return _pad_tokens(x, self.context.order.padded_len, dim).index_select(dim, self.context.positions(x.device))

    def run_full(self, call: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Call a function with tensors of full sequences, and return this rank's tokens."""
        self.inside = True
        try:
            return self.keep(call(*map(self.gather, args)))
        finally:
            self.inside = False

    # -- modules ------------------------------------------------------------------------------------------------------

    def attach(self, name: str, module: nn.Module, *, sequence_parallel: bool) -> None:
        """Give a module full sequences."""
        self.modules.append(name)
        rows = [child for child in module.modules() if isinstance(child, ReducedLinear)] if sequence_parallel else []
        if len(rows) > 1 or (sequence_parallel and name in self.layer_names):
            raise ValueError(
                f"context parallelism gathers sequences for all of {type(module).__name__}, in which sequence "
                "parallelism divides them; use sp=0, or cp=1"
            )
        module.register_forward_pre_hook(self._enter_at_row if rows else self._enter, with_kwargs=True)
        if rows:
            rows[0].register_forward_pre_hook(self._leave_at_row)
        else:
            module.register_forward_hook(self._leave, prepend=True)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.inside = True
        return tuple(map(self._gather_hidden, args)), {key: self._gather_hidden(value) for key, value in kwargs.items()}

    def _enter_at_row(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.inside = True
        if args:
            return (self._gather_hidden(args[0]), *args[1:]), kwargs
        return args, {**kwargs, HIDDEN: self._gather_hidden(kwargs[HIDDEN])}

    def _gather_hidden(self, x: Any) -> Any:
        return self.gather(x) if is_hidden(x, self.local_length, self.hidden_dims) else x

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        self.inside = False
        if isinstance(output, tuple | list):
            return type(output)((self.keep(output[0]), *output[1:]))
        return self.keep(output)

    def _leave_at_row(self, _module: nn.Module, args: Any) -> Any:
        self.inside = False
        return (self.keep(args[0]), *args[1:])


@lru_cache(maxsize=8)
def _places(order: ZigzagOrder, axis: MeshAxis, device: torch.device) -> tuple[Tensor, Tensor]:
    """The place in the sequence of each token in the order of the ranks, and where each of the sequence's is there."""
    places = torch.tensor([place for rank in range(axis.size) for place in order.rank_positions(rank)], device=device)
    return places, places.argsort()[: order.seq_len]


def _pad_tokens(x: Tensor, length: int, dim: int = 1) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - dim - 1) + (0, length - x.shape[dim]))
