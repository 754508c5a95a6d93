"""Between host and device without waiting: what is sent ahead, and what is read when it has come."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device. From memory that the system may move, a copy to a GPU would wait for the GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


def start_host_copy(tensor: Tensor) -> Callable[[], list[float]]:
    """Asks for the numbers of a tensor as they are now. Who asks waits for what made them, and for nothing after it."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    come = torch.cuda.Event()
    come.record()

    def ask() -> list[float]:
        come.synchronize()
        return here.tolist()

    return ask
