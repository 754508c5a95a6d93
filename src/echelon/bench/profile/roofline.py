"""The floor of a step: its matmuls and attention timed alone, and its minimum bytes at the bandwidth of a copy.

A perfect step on stock kernels, without recomputation, would take this long. A kernel alone is a little faster than in
a step, where others keep the device hot, so no step reaches the floor.
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
"""tokens per chunk of logits in the LM head"""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""bytes of the copy that measures bandwidth"""
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Roofline:
    seconds: dict[str, float]
    """per step, by category"""
    copy_bandwidth: float
    """bytes per second, read and written"""


def measure_roofline(measurement: Measurement) -> Roofline:
    device, model, tokens = torch.device(measurement.device), measurement.model, measurement.tokens
    gemm_seconds = _fp8_gemm_seconds if measurement.precision.startswith("fp8") else _gemm_seconds
    width, qkv = model.width, model.width + 2 * model.kv_heads * model.head_dim
    linear_sizes = ((width, qkv), (width, width), (width, 2 * model.ffn), (model.ffn, width))
    matmuls = model.layers * sum(gemm_seconds(measurement, tokens, inputs, outputs) for inputs, outputs in linear_sizes)
    chunk = min(tokens, CHUNK)
    matmuls += _gemm_seconds(measurement, chunk, width, model.vocab) * tokens / chunk
    bandwidth, attention = _copy_bandwidth(device), model.layers * _attention_seconds(measurement)
    others = {name: moved / bandwidth for name, moved in min_bytes(measurement).items()}
    return Roofline(seconds={"matmuls": matmuls, "attention": attention, **others}, copy_bandwidth=bandwidth)


def _gemm_seconds(measurement: Measurement, tokens: int, inputs: int, outputs: int) -> float:
    """Seconds of a linear layer's three matmuls: forward, input gradient, weight gradient."""
    sizes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    x, weight, gradient = (_random_tensor(measurement, *size) for size in sizes)
    device = torch.device(measurement.device)
    matmuls = (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return sum(time_alone(matmul, device) for matmul in matmuls)


def _fp8_gemm_seconds(measurement: Measurement, tokens: int, inputs: int, outputs: int) -> float:
    """The same in fp8, where both operands must be contiguous along the summed dimension."""
    device, one = torch.device(measurement.device), torch.ones(1, device=measurement.device)

    def seconds(m: int, k: int, n: int) -> float:
        left, right = (_random_tensor(measurement, rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        return time_alone(lambda: compat.scaled_mm(left, right.t(), one, one, torch.bfloat16, None), device)

    return seconds(tokens, inputs, outputs) + seconds(tokens, outputs, inputs) + seconds(outputs, tokens, inputs)


def _attention_seconds(measurement: Measurement) -> float:
    """Seconds of causal attention in one layer, forward and backward, by torch's fastest kernel."""
    model, device = measurement.model, torch.device(measurement.device)
    sizes = [(heads, measurement.seq_len, model.head_dim) for heads in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = (_random_tensor(measurement, measurement.batch, *size).requires_grad_() for size in sizes)
    gradient = _random_tensor(measurement, measurement.batch, *sizes[0])
    fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def forward_and_backward() -> object:
        with sdpa_kernel(fast, set_priority=True) if device.type == "cuda" else nullcontext():
            gqa = model.heads != model.kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return torch.autograd.grad(out, (q, k, v), gradient)

    return time_alone(forward_and_backward, device)


def _copy_bandwidth(device: torch.device) -> float:
    size = COPY_BYTES[device.type]
    read = torch.zeros(size, dtype=torch.uint8, device=device)
    written = torch.empty_like(read)
    return 2 * size / time_alone(lambda: written.copy_(read), device)


def _random_tensor(measurement: Measurement, *size: int) -> Tensor:
    return torch.randn(size, device=measurement.device, dtype=COMPUTE_DTYPES[measurement.precision])


def time_alone(call: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of back-to-back calls on an otherwise idle device."""
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / REPEATS
