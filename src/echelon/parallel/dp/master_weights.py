"""Master values: the optimizer's shard of a unit, from which a rank's own part of the parameters follows.

    WholeMaster   one tensor. Where it is of the compute type, and the parameters stay, it *is* a slice of them. In
                  bfloat16 that means that there is no master, and updates are rounded by chance (kernels/optim/fused_adamw.py).
    SplitMaster   float32 beside bfloat16 parameters: the parameters hold the upper halves, and only the lower halves
                  lie beside them (kernels/optim/split_fp32.py). 4 bytes an element for both, and no cast after an update.

Where parameters are freed or have versions, a master holds a shard of its own in either kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels.optim import split_fp32

FULL_SHARD = slice(None)


class UnsplitMasterWeights:
    """Values in one tensor; `in_place` says that it is the unit's own slice of the parameters."""

    def __init__(self, tensor: Tensor, *, in_place: bool):
        self.tensor, self.in_place, self.dtype = tensor, in_place, tensor.dtype

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """The shard itself: who writes here changes the master."""
        return self.tensor[part]

    def set_values(self, start: int, values: Tensor) -> None:
        self.tensor[start : start + len(values)] = values

    def param_shard(self, destination: Tensor) -> Tensor:
        """This rank's part of the parameters, to be gathered; a cast is made in `own`, its place among them."""
        if self.tensor.dtype == destination.dtype:
            return self.tensor
        return destination.copy_(self.tensor)

    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return (self.tensor,)


class SplitMasterWeights:
    """Values as bfloat16 (`high`) and the rest of their bits (`low`)."""

    def __init__(self, high: Tensor, *, in_place: bool):
        self.high, self.in_place, self.dtype = high, in_place, torch.float32
        self.low = torch.zeros(high.shape, dtype=torch.int16, device=high.device)

    def values(self, part: slice = FULL_SHARD) -> Tensor:
        """In float32, as a copy."""
        return split_fp32.join_halves(self.high[part], self.low[part])

    def set_values(self, start: int, values: Tensor) -> None:
        where = slice(start, start + len(values))
        split_fp32.split_halves(values.to(self.high.device, torch.float32), self.high[where], self.low[where])

    def param_shard(self, destination: Tensor) -> Tensor:
        """This rank's part of the parameters, to be gathered: it needs no cast."""
        return self.high

    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return self.high, self.low


MasterWeights = UnsplitMasterWeights | SplitMasterWeights


def make_master_weights(param_shard: Tensor, dtype: torch.dtype, *, split: bool, in_place: bool) -> MasterWeights:
    """The master of a unit whose own slice of the parameters is `own`; `in_place` where that slice stays."""
    if split:
        return SplitMasterWeights(param_shard if in_place else torch.zeros_like(param_shard), in_place=in_place)
    if in_place and param_shard.dtype == dtype:
        return UnsplitMasterWeights(param_shard, in_place=True)
    return UnsplitMasterWeights(torch.zeros(param_shard.shape, dtype=dtype, device=param_shard.device), in_place=False)
