"""MFU, HFU, the peak FLOP/s they are relative to, and peak memory.

MFU counts the FLOPs that a step requires, HFU those that are executed: recomputation adds to the latter. Both are
fractions of the bf16 peak of all devices together.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.memory.checkpointing.cost import RecomputeWork, recompute_work
from echelon.models.model_config import ModelConfig
from echelon.planning.cluster.device_kinds import DEVICE_KINDS

if TYPE_CHECKING:
    import torch

    from echelon.training.engine import Engine


BF16_PEAK = {
    **{kind.driver_name: kind.peak("bf16") for kind in DEVICE_KINDS.values() if kind.name != "cpu"},
    "T4": 65e12,  # fp16: it has no bf16
    "A10": 125e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "A800": 312e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100 PCIe": 756.5e12,
    "H100 NVL": 835.5e12,
    "H200 NVL": 835.5e12,
    "GH200": 989.5e12,
}
"""Dense bf16 FLOP/s of one device, by a part of the name that its driver reports: the planner's kinds, and GPUs that it
does not plan for."""


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """The most FLOP/s one device can do."""

    flops: float
    """FLOP/s."""
    source: str
    """Where the number comes from."""


def mfu(flops_per_token: float, tokens_per_s: float, peak: float) -> float:
    """Model FLOPs utilisation. `tokens_per_s` and `peak` (FLOP/s) are of all devices together."""
    return flops_per_token * tokens_per_s / peak


def hfu(flops_per_token: float, tokens_per_s: float, peak: float, *, recomputed: float = 0.0) -> float:
    """Hardware FLOPs utilisation: MFU plus what recomputation executes (`recomputed` FLOPs per token)."""
    return mfu(flops_per_token + recomputed, tokens_per_s, peak)


def recomputed_flops(
    recompute_shares: RecomputeWork, block_flops_per_token: float, attention_flops_per_token: float = 0.0
) -> float:
    """Return the FLOPs per token that recomputation executes. Block FLOPs exclude the output layer and include
    attention (scores and values). A forward is a third of a step."""
    blocks = recompute_shares.forward * block_flops_per_token
    return (blocks + recompute_shares.attention * attention_flops_per_token) / 3


def peak_flops(device: torch.device) -> PeakFlops:
    """Return the peak of one device: from the table for a known GPU, else measured in about 0.2 s."""
    import torch

    if device.type == "cuda":
        return known_peak(torch.cuda.get_device_name(device)) or measure_peak(device, torch.bfloat16)
    # CPUs without matrix units are slower in bf16 than in float32, so float32 is the fairer yardstick there.
    return measure_peak(device, torch.float32)


def known_peak(device_name: str) -> PeakFlops | None:
    """Return the peak of a GPU by the name that its driver reports, e.g. "NVIDIA A100-SXM4-80GB"."""
    names = [name for name in BF16_PEAK if re.search(rf"\b{re.escape(name)}\b", device_name)]
    longest = max(names, key=len, default="")
    return PeakFlops(flops=BF16_PEAK[longest], source=f"dense bf16 peak of {longest}") if longest else None


def measure_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> PeakFlops:
    """Measure the best of repeated square matmuls, with the current threads of this process."""
    import torch

    size = 512 if device.type == "cpu" else 4096
    left, right, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))

    def once() -> float:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()  # The first call loads the library and is slow.
    best, end = once(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, once())
    name = str(dtype).removeprefix("torch.")
    return PeakFlops(flops=2 * size**3 / best, source=f"measured here: {name} matmul of {size} x {size}")


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated by tensors on a GPU; on a CPU the resident set of the process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def recompute_shares(engine: Engine) -> RecomputeWork:
    """Return what recomputation executes, as shares of the layers' forward and attention."""
    from echelon.memory.checkpointing.memory_budget import MemoryBudget

    checkpointing, layout = engine.parallel.checkpointing, engine.layout
    if isinstance(checkpointing, MemoryBudget):
        return checkpointing.recompute_work
    model = getattr(engine.model, "config", None)
    # Attention with dropout materializes its probabilities.
    materialized = isinstance(model, ModelConfig) and model.dropout > 0 and layout.cp == 1
    layers = max(len(checkpointing.forms), 1)
    return recompute_work(
        layout.recompute, layers=layers, layer_bytes=1.0, input_bytes=0.0, materialized_scores=materialized
    )
