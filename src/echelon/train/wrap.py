"""`wrap`: a drop-in for DDP and FSDP around a user's own loop.

    model = ec.wrap(model, "dp=4,zero=3")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()

Gradients are averaged over dp, as DDP does. That is the gradient of the whole batch's mean only where every rank has
as many targets; `model.mean(total, count)` gives the exact mean over all ranks, and its exact gradient, where they
differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from echelon import compat
from echelon.layout import Layout, check
from echelon.parallel.apply import WORLD, Options, apply
from echelon.parallel.axis import Axis, world_size


class Wrapped(nn.Module):
    """A model on a layout, whose forward and backward do their own communication.

    `parameters()` are what the optimizer of this rank updates: the model's own parameters where they are whole
    (zero=0), flat slices of them where they are sharded.
    """

    def __init__(self, model: nn.Module, layout: Layout, options: Options):
        super().__init__()
        self.layout = layout
        self._parallel = apply(model, layout, options)
        self.module = self._parallel.model
        self._shards = dict(self._exposed())
        self._last, self._fresh, self._changed, self._queued = True, True, False, False
        self.module.register_forward_pre_hook(self._before_forward)
        for unit in self._parallel.flat.units:
            unit.scale = 1.0 / layout.dp
            for parameter in unit.parameters.values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._during_backward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over all ranks' targets, from this rank's sum of losses and number of targets."""
        out: Tensor = _GlobalMean.apply(total, count, self._parallel.axes["dp"])
        return out

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last microbatch of a step: gradients add up on this rank."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        lead = prefix + "." if prefix else ""
        for name, parameter in self._shards.items():
            yield lead + name, parameter

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every logical parameter, whole, on every rank, under each of its names; buffers too."""
        found: dict[str, Tensor] = {}
        placement, flat = self._parallel.placement, self._parallel.flat
        for unit, piece in flat.pieces():
            entry = piece.entry
            local = unit.master.new_zeros(entry.local_numel)
            if piece.owner and placement.first_replica:
                local[piece.start : piece.stop] = flat.view(unit.master, piece)
            whole = unit.master.new_zeros(entry.shape)
            box = tuple(slice(low, high) for low, high in piece.box)
            real = tuple(slice(0, high - low) for low, high in piece.box)
            whole[box] = local.view(entry.local_shape)[real]
            self._parallel.axes[WORLD].all_reduce(whole)
            found.update(dict.fromkeys(entry.names, whole))
        return found | {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _exposed(self) -> Iterator[tuple[str, nn.Parameter]]:
        flat = self._parallel.flat
        for unit, piece in flat.pieces():
            if unit.shares_storage and self._parallel.policy.shards == 1:
                yield piece.entry.name, unit.parameters[piece.entry.name]
            elif piece.start < piece.stop:
                yield piece.entry.name, nn.Parameter(flat.view(unit.master, piece), requires_grad=piece.entry.trainable)

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        flat = self._parallel.flat
        if self._changed and self._fresh:
            flat.updated()  # the optimizer may have stepped since the last backward
            self._changed = False
        if torch.is_grad_enabled():
            if self._fresh and any(p.grad is not None for p in self._shards.values()):
                raise ValueError(
                    "the last step's gradients are still there; call optimizer.zero_grad() before the next step, "
                    "and put all but the last microbatch of a step inside model.no_sync()"
                )
            flat.begin(first=self._fresh, last=self._last)

    def _during_backward(self, _parameter: Tensor) -> None:
        if not self._queued:
            self._queued = True
            compat.after_backward(self._after_backward)

    def _after_backward(self) -> None:
        self._queued = False
        flat = self._parallel.flat
        flat.end()
        self._fresh = self._last
        if not self._last:
            return
        self._changed = True
        for unit, piece in flat.pieces():
            if piece.entry.trainable and piece.entry.name in self._shards:
                parameter = self._shards[piece.entry.name]
                parameter.grad = flat.view(unit.grad, piece).view(parameter.shape)


class _GlobalMean(Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, axis: Axis) -> Tensor:
        sums = axis.all_reduce(torch.stack([total.detach().double(), count.detach().double()]))
        ctx.factor = float(axis.size / sums[1].clamp(min=1.0))
        return (sums[0] / sums[1].clamp(min=1.0)).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Times dp, because the average over dp divides by it.
        return gradients[0] * ctx.factor, None, None


def wrap(model: nn.Module, layout: Layout | str = "", **options: Any) -> Wrapped:
    """Lays a model out over the ranks of the default process group, in place. The model's own device and type are kept.

    Every rank starts from the first rank's values, as with DDP. Options: `reshard_after_forward`, `prefetch`,
    `units`, `seed`.
    """
    if isinstance(layout, str):
        layout = check(layout, world=world_size())
    if layout.plan_only:
        raise ValueError("; ".join(layout.plan_only))
    if layout.accumulate > 1 or layout.microbatch > 1:
        raise ValueError(
            "in a loop of your own the batch is yours; leave microbatch and accumulate out of the layout, "
            "and use model.no_sync()"
        )
    first = next(model.parameters())
    chosen = Options(
        device=first.device, compute=first.dtype, master=torch.promote_types(first.dtype, torch.float32), **options
    )
    if not first.is_meta:
        _agree(model)
    else:
        chosen = replace(chosen, device=torch.device("cpu"))
    return Wrapped(model, layout, chosen)


@torch.no_grad()
def _agree(model: nn.Module) -> None:
    """Everyone takes rank 0's parameters and buffers."""
    if world_size() == 1:
        return
    everyone = Axis(
        "world", range(world_size()), torch.distributed.get_rank(), torch.distributed.group.WORLD, frozenset()
    )
    for tensor in [*model.parameters(), *model.buffers()]:
        everyone.broadcast(tensor.data)
