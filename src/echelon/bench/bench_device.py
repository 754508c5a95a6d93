"""What the choice of measurements depends on: the kind of device here, its memory, whether it multiplies in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

FP8_FROM = (8, 9)
"""the compute capability of the first devices with products in 8 bits"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    kind: str
    """cuda or cpu"""
    name: str
    memory: int
    """bytes of the first device; 0 where they are not asked for"""
    fp8: bool = False


def here() -> Machine:
    import torch

    if not torch.cuda.is_available():
        return Machine(kind="cpu", name="this machine's processor", memory=0)
    found = torch.cuda.get_device_properties(0)
    return Machine(kind="cuda", name=found.name, memory=found.total_memory, fp8=(found.major, found.minor) >= FP8_FROM)
