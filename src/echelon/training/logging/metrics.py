"""How well the hardware is used: MFU, HFU, the peak they are measured against, and memory.

MFU counts the FLOPs that the mathematics of a step needs, HFU those that were executed: recomputation adds to the
second only. Both are shares of the bf16 peak of all devices together.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.memory.checkpointing.cost import RecomputeWork, recompute_work
from echelon.models.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from echelon.training.engine import Engine


BF16_PEAK = {
    "V100": 125e12,  # fp16: it has no bf16
    "T4": 65e12,  # fp16
    "A10": 125e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100": 989.5e12,
    "H100 PCIe": 756.5e12,
    "H100 NVL": 835.5e12,
    "H200": 989.5e12,
    "H200 NVL": 835.5e12,
    "H800": 989.5e12,
    "GH200": 989.5e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
}
"""Dense bf16 FLOP/s of one device, by a word or two of the name its driver reports."""


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
    """FLOPs per token that recomputation executes again. Those of the blocks exclude the output layer, those of
    attention (scores and values) are among them. A forward is a third of a step."""
    return (
        recompute_shares.forward * block_flops_per_token + recompute_shares.attention * attention_flops_per_token
    ) / 3


def peak_flops(device: torch.device) -> PeakFlops:
    """Peak of one device: from the table for a known GPU; for any other it is measured, in about 0.2 s."""
    import torch

    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device))
        return known or measure_peak(device, torch.bfloat16)
    # CPUs without matrix units are slower in bf16 than in float32, so float32 is the fairer yardstick there.
    return measure_peak(device, torch.float32)


def known_peak(device_name: str) -> PeakFlops | None:
    """Peak of a GPU by the name its driver reports, e.g. "NVIDIA A100-SXM4-80GB"."""
    words = [kind for kind in BF16_PEAK if re.search(rf"\b{re.escape(kind)}\b", device_name)]
    if not words:
        return None
    kind = max(words, key=len)
    return PeakFlops(flops=BF16_PEAK[kind], source=f"dense bf16 peak of {kind}")


def measure_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> PeakFlops:
    """The best of repeated square matmuls, with the threads this process has now."""
    import torch

    size = 512 if device.type == "cpu" else 4096
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)

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
    """Most bytes in use so far: allocated by tensors on a GPU; on a CPU the resident set of the whole process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def recompute_shares(engine: Engine) -> RecomputeWork:
    from echelon.memory.checkpointing.memory_budget import MemoryBudget

    found, layout = engine.parallel.checkpointing, engine.layout
    if isinstance(found, MemoryBudget):
        return found.recompute_work
    shape = getattr(engine.model, "config", None)
    # With dropout on them, probabilities are written out.
    written_out = isinstance(shape, ModelConfig) and shape.dropout > 0 and layout.cp == 1
    layers = max(len(found.forms), 1)
    return recompute_work(
        layout.recompute, layers=layers, layer_bytes=1.0, input_bytes=0.0, materialized_scores=written_out
    )
