"""What the choice of measurements depends on: the kind of device here, its memory, whether it multiplies in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_FP8_CAPABILITY = (8, 9)
"""the compute capability of the first devices with products in 8 bits"""


@dataclass(frozen=True, kw_only=True)
class BenchDevice:
    device_type: str
    """cuda or cpu"""
    name: str
    memory: int
    """bytes of the first device; 0 where they are not asked for"""
    fp8: bool = False


def detect_device() -> BenchDevice:
    import torch

    if not torch.cuda.is_available():
        return BenchDevice(device_type="cpu", name="this machine's processor", memory=0)
    found = torch.cuda.get_device_properties(0)
    return BenchDevice(
        device_type="cuda",
        name=found.name,
        memory=found.total_memory,
        fp8=(found.major, found.minor) >= FIRST_FP8_CAPABILITY,
    )
