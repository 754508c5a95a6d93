"""The gradient norm and clipping by the placement record: every logical element once, in every layout.

[Note: which gradient is not finite]

The norm is made of the norms of the parameters, in one pass over all gradients. Those stay on the device, and are read
only when the norm is not finite: then they tell whose gradient it was. What a rank holds and does not count, such as
its copy of a weight that another rank counts, is looked at all the same, and makes the norm not finite everywhere: a
rank never updates alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from echelon import compat
from echelon.layout.placement import Piece
from echelon.parallel.comm.mesh_axis import all_reduce_coalesced
from echelon.parallel.dp.grad_reduction import flat_norm
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.sharded_model import ShardedModel
from echelon.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class GradientSlice:
    """A run of one parameter's elements in a unit's shard, without padding."""

    group: ParamGroup
    span: slice
    name: str
    """of the parameter"""
    is_counted: bool
    """by this rank: exactly one rank of each replica counts an element"""


def gradient_slices(parallel: ParallelModel, *, first_replica_only: bool = False) -> list[GradientSlice]:
    """All trainable elements of this rank. Replicas count each for themselves, or with `first` the first alone."""
    return [
        GradientSlice(unit, slice(p.shard_offset + a - p.start, p.shard_offset + b - p.start), p.param.name, counted)
        for unit, p in parallel.sharded_model.pieces()
        if p.param.trainable
        for counted in (p.is_owner and (p.is_first_replica or not first_replica_only),)
        for a, b in p.unpadded_runs()
    ]


class GradientNorm:
    """Norm over all ranks. Call it after reduction; shards and parts of tp differ, replicas are equal."""

    def __init__(self, parallel: ParallelModel):
        # Stages of an asynchronous schedule update at different times: each has a norm of its own.
        together = parallel.layout.pp > 1 and not parallel.policy.has_weight_versions
        # Experts lie on other ranks than the rest: then all ranks of a stage count, and each copy once.
        folded = parallel.has_expert_params
        shards = "replica*shard*cp*tp" if folded else f"{parallel.policy.shard_axis}*tp"
        self.axis = parallel.axes.get_or_add(f"pp*{shards}" if together else shards)
        found = gradient_slices(parallel, first_replica_only=folded)
        # Of one kind after the other, as they are computed; what is counted comes first.
        order = sorted(found, key=lambda part: (not part.is_counted, str(_batch_key(part))))
        self.slices, self._num_counted = order, sum(part.is_counted for part in order)
        for part in order:
            part.group.reduction.early_norm_slices.append(part.span)
        self.device = parallel.options.device

    @torch.no_grad()
    def __call__(self, norm_type: float = 2.0) -> Tensor:
        """A float64 scalar, equal on all ranks, on the device. `kind` is 2 or infinity."""
        return self.norm_and_slice_norms(norm_type)[0]

    @torch.no_grad()
    def norm_and_slice_norms(self, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """The norm, and those of `parts` (float64) on this rank alone."""
        each = self._slice_norms(self.slices, norm_type)
        return self.reduce_norm(each, norm_type), each

    @torch.no_grad()
    def add_group(self, group: ParamGroup, slice_norms: Tensor) -> None:
        """Writes the norms of one unit's parts to their places among all of this rank's."""
        places = [place for place, part in enumerate(self.slices) if part.group is group]
        for place, norm in zip(places, self._slice_norms([self.slices[place] for place in places], 2.0), strict=True):
            slice_norms[place] = norm

    def reduce_norm(self, slice_norms: Tensor, norm_type: float = 2.0) -> Tensor:
        """The norm over all ranks from those of this rank's parts."""
        local = (
            torch.linalg.vector_norm(slice_norms[: self._num_counted], norm_type)
            if self._num_counted
            else slice_norms.new_zeros(())
        )
        if self._num_counted < len(slice_norms):
            local = local + (slice_norms[self._num_counted :] * 0.0).sum()  # not a number where one is not finite
        if math.isinf(norm_type):
            return self.axis.all_reduce(local, op="max")
        return self.axis.all_reduce(local.square()).sqrt()

    def _slice_norms(self, parts: Sequence[GradientSlice], norm_type: float) -> Tensor:
        """Short types are summed in float32 as they are read: no copy of them is made."""
        found: list[Tensor] = []
        for (dtype, away), alike in groupby(parts, key=_batch_key):
            if away or self.device.type == "cpu":
                found += [self._slice_norm(part, norm_type) for part in alike]
            else:
                slices = [part.group.grad[part.span] for part in alike]
                found += compat.foreach_norms(slices, norm_type, torch.promote_types(dtype, torch.float32))
        return torch.stack(found).double() if found else torch.zeros(0, dtype=torch.float64, device=self.device)

    def _slice_norm(self, part: GradientSlice, norm_type: float) -> Tensor:
        """Of gradients on the host, those that left early have told it before."""
        if norm_type == 2.0 and part.group.reduction.early_norms:
            return part.group.reduction.early_norms[part.span.start]
        return flat_norm(part.group.grad[part.span], norm_type).to(self.device)


def _batch_key(part: GradientSlice) -> tuple[torch.dtype, bool]:
    """What is computed at once: of one type, on one device."""
    return part.group.grad_dtype, part.group.offloaded is not None


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What all gradients are multiplied by, so that their norm is at most `limit`; 0 turns clipping off."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)


class PartialGradients:
    """Gradients of which each rank of an axis holds one summand: all-reduced over it once per step."""

    def __init__(self, parallel: ParallelModel):
        by_axis: dict[str, list[tuple[ParamGroup, Piece]]] = {}
        for group, piece in parallel.sharded_model.pieces():
            for name in piece.param.partial_grad_axes if piece.start < piece.stop else ():
                by_axis.setdefault(name, []).append((group, piece))
        # In one order on all ranks.
        self._by_axis = [(parallel.axes[name], pieces) for name, pieces in sorted(by_axis.items())]

    def all_reduce(self, only: ParamGroup | None = None) -> None:
        """All-reduce in place, of all parameter groups or one. Gradients on the host travel over the device."""
        for axis, pieces in self._by_axis:
            wanted = [(group, piece) for group, piece in pieces if only is None or group is only]
            grads = [ShardedModel.piece_view(group.grad, piece) for group, piece in wanted]
            on_device = [grad.to(group.unsharded_param.device) for grad, (group, _) in zip(grads, wanted, strict=True)]
            all_reduce_coalesced(axis, on_device)
            for grad, reduced in zip(grads, on_device, strict=True):
                if grad is not reduced:
                    grad.copy_(reduced)
