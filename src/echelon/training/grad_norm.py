"""Gradient norm and clipping: every logical element counts once, in every layout.

[Note: which gradient is not finite]

The norm is computed from the norms of this rank's gradient slices, in one pass over all gradients. The slice norms stay
on the device, and are read only when the norm is not finite: they show whose gradient it was. A slice that another rank
counts, such as a replicated weight, is measured too, and makes the norm not finite on all ranks: no rank updates alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from echelon import compat
from echelon.parallel.dp.grad_reduction import flat_norm
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class GradientSlice:
    """A contiguous range of one parameter in a parameter group's gradient shard, without padding."""

    group: ParamGroup
    span: slice
    name: str
    """name of the parameter"""
    is_counted: bool
    """whether this rank counts it: exactly one rank of each replica counts an element"""


def gradient_slices(parallel: ParallelModel, *, first_replica_only: bool = False) -> list[GradientSlice]:
    """List the slices of all trainable elements of this rank. Each replica counts its elements, or only the first."""
    return [
        GradientSlice(group, slice(p.shard_offset + a - p.start, p.shard_offset + b - p.start), p.param.name, counted)
        for group, p in parallel.sharded_model.pieces()
        if p.param.trainable
        for counted in (p.is_owner and (p.is_first_replica or not first_replica_only),)
        for a, b in p.unpadded_runs()
    ]


class GradientNorm:
    """Gradient norm over all ranks, after gradient reduction."""

    def __init__(self, parallel: ParallelModel):
        # Stages of an asynchronous schedule update at different times, so each has its own norm.
        over_stages = parallel.layout.pp > 1 and not parallel.policy.has_weight_versions
        # Expert parameters are sharded over other ranks than the rest: then all ranks of a stage count, each copy once.
        has_experts = parallel.has_expert_params
        shards = "replica*shard*cp*tp" if has_experts else f"{parallel.policy.shard_axis}*tp"
        self.axis = parallel.axes.get_or_add(f"pp*{shards}" if over_stages else shards)
        slices = gradient_slices(parallel, first_replica_only=has_experts)
        # Counted slices first, and together those that one kernel measures.
        order = sorted(slices, key=lambda part: (not part.is_counted, str(_batch_key(part))))
        self.slices, self._num_counted = order, sum(part.is_counted for part in order)
        for part in order:
            part.group.reduction.early_norm_slices.append(part.span)
        self.device = parallel.options.device

    @torch.no_grad()
    def __call__(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm: a float64 scalar on the device, equal on all ranks. `norm_type` is 2 or infinity."""
        return self.norm_and_slice_norms(norm_type)[0]

    @torch.no_grad()
    def norm_and_slice_norms(self, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """Return the norm over all ranks, and the norms of this rank's `slices` (float64)."""
        slice_norms = self._slice_norms(self.slices, norm_type)
        return self.reduce_norm(slice_norms, norm_type), slice_norms

    @torch.no_grad()
    def add_group(self, group: ParamGroup, slice_norms: Tensor) -> None:
        """Write the norms of one parameter group's slices into `slice_norms`."""
        indices = [index for index, part in enumerate(self.slices) if part.group is group]
        for index, norm in zip(indices, self._slice_norms([self.slices[i] for i in indices], 2.0), strict=True):
            slice_norms[index] = norm

    def reduce_norm(self, slice_norms: Tensor, norm_type: float = 2.0) -> Tensor:
        """Return the norm over all ranks from the norms of this rank's slices."""
        counted, others = slice_norms[: self._num_counted], slice_norms[self._num_counted :]
        local = torch.linalg.vector_norm(counted, norm_type) if len(counted) else slice_norms.new_zeros(())
        if len(others):
            local = local + (others * 0.0).sum()  # NaN where a slice that is not counted is not finite
        if math.isinf(norm_type):
            return self.axis.all_reduce(local, op="max")
        return self.axis.all_reduce(local.square()).sqrt()

    def _slice_norms(self, parts: Sequence[GradientSlice], norm_type: float) -> Tensor:
        """Norms in at least float32, without a float32 copy of 16-bit gradients."""
        norms: list[Tensor] = []
        for (dtype, on_host), alike in groupby(parts, key=_batch_key):
            if on_host or self.device.type == "cpu":
                norms += [self._slice_norm(part, norm_type) for part in alike]
            else:
                slices = [part.group.grad[part.span] for part in alike]
                norms += compat.foreach_norms(slices, norm_type, torch.promote_types(dtype, torch.float32))
        return torch.stack(norms).double() if norms else torch.zeros(0, dtype=torch.float64, device=self.device)

    def _slice_norm(self, part: GradientSlice, norm_type: float) -> Tensor:
        """Norm of one slice; of an offloaded gradient it may be known from before its transfer."""
        if norm_type == 2.0 and part.group.reduction.early_norms:
            return part.group.reduction.early_norms[part.span.start]
        return flat_norm(part.group.grad[part.span], norm_type).to(self.device)


def _batch_key(part: GradientSlice) -> tuple[torch.dtype, bool]:
    """Slices of one dtype on one device are measured together."""
    return part.group.grad_dtype, part.group.offloaded is not None


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of `clip_grad_norm_`, which brings the norm down to `max_norm`; 0 turns clipping off."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
