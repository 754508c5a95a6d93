"""The device to benchmark: its type, its memory, whether it has fp8 matmuls."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_FP8_CAPABILITY = (8, 9)
"""the compute capability of the first devices with fp8 matmuls"""


@dataclass(frozen=True, kw_only=True)
class BenchDevice:
    device_type: str
    """cuda or cpu"""
    name: str
    memory: int
    """bytes of the first device; 0 on a CPU"""
    fp8: bool = False


def detect_device() -> BenchDevice:
    import torch

    if not torch.cuda.is_available():
        return BenchDevice(device_type="cpu", name="this machine's CPU", memory=0)
    properties = torch.cuda.get_device_properties(0)
    return BenchDevice(
        device_type="cuda",
        name=properties.name,
        memory=properties.total_memory,
        fp8=(properties.major, properties.minor) >= FIRST_FP8_CAPABILITY,
    )
