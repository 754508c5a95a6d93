"""Master weights: the optimizer's shard of a parameter group, from which a rank's parameter shard is derived.

    UnsplitMasterWeights   one tensor. If it has the compute dtype, and the parameters stay in place, it *is* a slice of
                           them. In bfloat16 that means that there are no master weights, and that updates use
                           stochastic rounding (kernels/optim/fused_adamw.py).
    SplitMasterWeights     float32 masters of bfloat16 parameters: the parameters hold the upper 16 bits, and only the
                           lower 16 bits are stored separately (kernels/optim/split_fp32.py). 4 bytes an element for
                           both, and no cast after an update.

If parameters are freed or have versions, both hold a shard of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels.optim import split_fp32

FULL_SHARD = slice(None)


class UnsplitMasterWeights:
    """Master weights in one tensor; `in_place` if it is the group's slice of the unsharded parameters."""

    def __init__(self, tensor: Tensor, *, in_place: bool):
        self.tensor, self.in_place, self.dtype = tensor, in_place, tensor.dtype

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """Return the shard itself: writing to it changes the master weights."""
        return self.tensor[part]

    def set_values(self, start: int, values: Tensor) -> None:
        self.tensor[start : start + len(values)] = values

    def param_shard(self, destination: Tensor) -> Tensor:
        """Return this rank's shard of the parameters, to be gathered; a cast is written to `destination`."""
        return self.tensor if self.tensor.dtype == destination.dtype else destination.copy_(self.tensor)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)


class SplitMasterWeights:
    """Master weights as bfloat16 (`high`) and the rest of their bits (`low`)."""

    def __init__(self, high: Tensor, *, in_place: bool):
        self.high, self.in_place, self.dtype = high, in_place, torch.float32
        self.low = torch.zeros(high.shape, dtype=torch.int16, device=high.device)

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """Return the values in float32, as a copy."""
        return split_fp32.join_halves(self.high[part], self.low[part])

    def set_values(self, start: int, values: Tensor) -> None:
        where = slice(start, start + len(values))
        split_fp32.split_halves(values.to(self.high.device, torch.float32), self.high[where], self.low[where])

    def param_shard(self, destination: Tensor) -> Tensor:
        """Return this rank's shard of the parameters, to be gathered: it needs no cast."""
        return self.high

    def tensors(self) -> tuple[Tensor, ...]:
        return self.high, self.low


MasterWeights = UnsplitMasterWeights | SplitMasterWeights


def make_master_weights(param_shard: Tensor, dtype: torch.dtype, *, split: bool, in_place: bool) -> MasterWeights:
    """Return the master weights of a group with this parameter shard; `in_place` if the shard stays."""
    if split:
        return SplitMasterWeights(param_shard if in_place else torch.zeros_like(param_shard), in_place=in_place)
    if in_place and param_shard.dtype == dtype:
        return UnsplitMasterWeights(param_shard, in_place=True)
    return UnsplitMasterWeights(torch.zeros(param_shard.shape, dtype=dtype, device=param_shard.device), in_place=False)
