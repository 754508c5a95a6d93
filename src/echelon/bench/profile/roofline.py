"""The floor of a step: its own products and attention timed alone, and its fewest bytes at the speed of a copy.

It is what a perfect step on stock kernels would take, without recomputation. A kernel alone is a little faster than in
a step, where others keep the device hot, so nothing quite reaches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from echelon import compat
from echelon.bench.echelon_step import COMPUTE_DTYPES
from echelon.bench.measurement import Measurement
from echelon.bench.profile.min_bytes import min_bytes
from echelon.bench.step_timing import synchronize

CHUNK = 8192
"""tokens of which the head makes logits at once"""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""bytes that are copied to know the speed of a copy"""
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Roofline:
    seconds: dict[str, float]
    """of one step, by category"""
    copy_bandwidth: float
    """bytes per second that a copy reads and writes"""


def measure_roofline(request: Measurement) -> Roofline:
    device, model, tokens = torch.device(request.device), request.model, request.tokens
    both_ways = _fp8_gemm_seconds if request.precision.startswith("fp8") else _gemm_seconds
    kv = model.kv_heads * model.head_dim
    of_a_layer = (
        (model.width, model.width + 2 * kv),
        (model.width, model.width),
        (model.width, 2 * model.ffn),
        (model.ffn, model.width),
    )
    products = model.layers * sum(both_ways(request, tokens, inputs, outputs) for inputs, outputs in of_a_layer)
    chunk = min(tokens, CHUNK)
    products += _gemm_seconds(request, chunk, model.width, model.vocab) * tokens / chunk
    copy = _copy_bandwidth(device)
    seconds = {name: moved / copy for name, moved in min_bytes(request).items()}
    return Roofline(
        seconds={"products": products, "attention": model.layers * _attention_seconds(request), **seconds},
        copy_bandwidth=copy,
    )


def _gemm_seconds(request: Measurement, tokens: int, inputs: int, outputs: int) -> float:
    """Seconds of a product's three ways: forward, gradient of the inputs, gradient of the weights."""
    x, weight, gradient = (
        _random_tensor(request, *size) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    device = torch.device(request.device)
    ways = (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return sum(time_alone(way, device) for way in ways)


def _fp8_gemm_seconds(request: Measurement, tokens: int, inputs: int, outputs: int) -> float:
    """The same in 8 bits, where every product is of two matrices whose rows are summed over."""
    device, one = torch.device(request.device), torch.ones(1, device=request.device)

    def seconds(m: int, k: int, n: int) -> float:
        left, right = (_random_tensor(request, rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        return time_alone(lambda: compat.scaled_mm(left, right.t(), one, one, torch.bfloat16, None), device)

    return seconds(tokens, inputs, outputs) + seconds(tokens, outputs, inputs) + seconds(outputs, tokens, inputs)


def _attention_seconds(request: Measurement) -> float:
    """Seconds of causal attention in one layer, both ways, by the fastest kernel that torch has."""
    model, device = request.model, torch.device(request.device)
    sizes = [(heads, request.seq_len, model.head_dim) for heads in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = (_random_tensor(request, request.batch, *size).requires_grad_() for size in sizes)
    gradient = _random_tensor(request, request.batch, *sizes[0])
    fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def both_ways() -> object:
        with sdpa_kernel(fast, set_priority=True) if device.type == "cuda" else nullcontext():
            gqa = model.heads != model.kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return torch.autograd.grad(out, (q, k, v), gradient)

    return time_alone(both_ways, device)


def _copy_bandwidth(device: torch.device) -> float:
    size = COPY_BYTES[device.type]
    read = torch.zeros(size, dtype=torch.uint8, device=device)
    written = torch.empty_like(read)
    return 2 * size / time_alone(lambda: written.copy_(read), device)


def _random_tensor(request: Measurement, *size: int) -> Tensor:
    return torch.randn(size, device=request.device, dtype=COMPUTE_DTYPES[request.precision])


def time_alone(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call among several, one right after the other, on a device that does nothing else."""
    for _ in range(3):
        call()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / REPEATS
