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
from echelon.bench.echelon_step import COMPUTE
from echelon.bench.measurement import Request
from echelon.bench.profile.min_bytes import least_bytes
from echelon.bench.step_timing import wait

CHUNK = 8192
"""tokens of which the head makes logits at once"""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}
"""bytes that are copied to know the speed of a copy"""
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Floor:
    seconds: dict[str, float]
    """of one step, by category"""
    copy: float
    """bytes per second that a copy reads and writes"""


def floor(request: Request) -> Floor:
    device, model, tokens = torch.device(request.device), request.model, request.tokens
    both_ways = _narrow_ways if request.precision.startswith("fp8") else _wide_ways
    kv = model.kv_heads * model.head_dim
    of_a_layer = (
        (model.width, model.width + 2 * kv),
        (model.width, model.width),
        (model.width, 2 * model.ffn),
        (model.ffn, model.width),
    )
    products = model.layers * sum(both_ways(request, tokens, inputs, outputs) for inputs, outputs in of_a_layer)
    chunk = min(tokens, CHUNK)
    products += _wide_ways(request, chunk, model.width, model.vocab) * tokens / chunk
    copy = _copy_rate(device)
    seconds = {name: moved / copy for name, moved in least_bytes(request).items()}
    return Floor(seconds={"products": products, "attention": model.layers * _attention(request), **seconds}, copy=copy)


def _wide_ways(request: Request, tokens: int, inputs: int, outputs: int) -> float:
    """Seconds of a product's three ways: forward, gradient of the inputs, gradient of the weights."""
    x, weight, gradient = (_made(request, *size) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    device = torch.device(request.device)
    ways = (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return sum(alone(way, device) for way in ways)


def _narrow_ways(request: Request, tokens: int, inputs: int, outputs: int) -> float:
    """The same in 8 bits, where every product is of two matrices whose rows are summed over."""
    device, one = torch.device(request.device), torch.ones(1, device=request.device)

    def seconds(m: int, k: int, n: int) -> float:
        left, right = (_made(request, rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        return alone(lambda: compat.scaled_product(left, right.t(), one, one, torch.bfloat16, None), device)

    return seconds(tokens, inputs, outputs) + seconds(tokens, outputs, inputs) + seconds(outputs, tokens, inputs)


def _attention(request: Request) -> float:
    """Seconds of causal attention in one layer, both ways, by the fastest kernel that torch has."""
    model, device = request.model, torch.device(request.device)
    sizes = [(heads, request.seq_len, model.head_dim) for heads in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = (_made(request, request.batch, *size).requires_grad_() for size in sizes)
    gradient = _made(request, request.batch, *sizes[0])
    fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def both_ways() -> object:
        with sdpa_kernel(fast, set_priority=True) if device.type == "cuda" else nullcontext():
            gqa = model.heads != model.kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return torch.autograd.grad(out, (q, k, v), gradient)

    return alone(both_ways, device)


def _copy_rate(device: torch.device) -> float:
    size = COPIED[device.type]
    read = torch.zeros(size, dtype=torch.uint8, device=device)
    written = torch.empty_like(read)
    return 2 * size / alone(lambda: written.copy_(read), device)


def _made(request: Request, *size: int) -> Tensor:
    return torch.randn(size, device=request.device, dtype=COMPUTE[request.precision])


def alone(once: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call among several, one right after the other, on a device that does nothing else."""
    for _ in range(3):
        once()
    wait(device)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        once()
    wait(device)
    return (time.perf_counter() - begun) / REPEATS
