"""How uneven a group's use of the experts is."""

from __future__ import annotations

import torch
from torch import Tensor


def cv_squared(x: Tensor) -> Tensor:
    """The squared coefficient of variation along the last dim: variance over squared mean. The variance is that of the
    numbers themselves (divided by n): a single number does not vary.
    """
    mean = x.mean(-1)
    # Where nothing was counted there is nothing uneven.
    return x.var(-1, correction=0) / mean.square().clamp(min=torch.finfo(x.dtype).tiny)
