"""AdamW in one pass: weights, moments and gradient are read once, weights and moments written once.

    g = gradient * scale
    m = beta1 m + (1 - beta1) g                   v = beta2 v + (1 - beta2) g g
    w = w (1 - lr decay) - (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

as `torch.optim.AdamW`. What changes from step to step comes in a small tensor (`numbers`), so that whoever calls this
need not wait for the device to know a count, a norm, or whether there was anything to learn from: where `live` is 0,
nothing is written.

[Note: rounding by chance]

With beta2 = 0.999 a step changes v by at most a thousandth, and bfloat16 has 8 bits: rounded to the nearest, v would
never fall. So moments in bfloat16 are rounded up as often as they are nearer to the upper neighbour: the mean is exact.
The random bits are a hash of the element's place and the step's number, the same in every run; the lower 16 are for m,
the upper 16 for v. The update itself reads m and v before they are rounded.

Weights in bfloat16 without a rest of their bits are rounded in the same way, by 16 bits of a second hash. With a small
learning rate most updates are shorter than half of a weight's last bit, and rounded to the nearest they would be lost.
Their place is that in the whole parameter (`Place`), so that every layout rounds them alike.

This file is plain torch, on any device, in chunks; adamw_gpu.py is the same as one kernel. They agree bit for bit: the
kernel is compiled without fused multiply-adds, and with exact roots and divisions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echelon.kernels.optim.split_fp32 import QUIET_NAN, join_halves, split_halves


@dataclass(frozen=True)
class ElementIndices:
    """Which random bits elements have: those of consecutive places, or of a box of a whole parameter.

    The box is a tensor of at most three dims, of which elements are a run that begins at `start` in row-major order:
    its last two sizes and the distances of neighbours along its first two dims in the whole parameter are given, and
    `base`, the place of its first element.
    """

    start: int = 0
    key: int = 0
    """of the parameter, 32 bits"""
    sizes: tuple[int, int] = (0, 0)
    """(second to last, last); zeros: consecutive places"""
    strides: tuple[int, int] = (0, 0)
    base: int = 0

    def advance(self, count: int) -> ElementIndices:
        return replace(self, start=self.start + count)

    def compute(self, count: int, device: torch.device) -> Tensor:
        """int64 [count]: the places of so many elements."""
        index = torch.arange(self.start, self.start + count, device=device)
        middle, inner = self.sizes
        if not inner:
            return index + self.base
        rows, column = index // inner, index % inner
        return self.base + (rows // middle) * self.strides[0] + (rows % middle) * self.strides[1] + column


(
    BETA1,
    ONE_MINUS_BETA1,
    BETA2,
    ONE_MINUS_BETA2,
    EPS,
    STEP_SIZE,
    RSQRT_CORRECTION,
    DECAY_FACTOR,
    GRAD_SCALE,
    DO_UPDATE,
) = range(10)
"""places in `numbers`; SIZE is lr / (1 - beta1^t), ROOT 1 / sqrt(1 - beta2^t), SHRINK 1 - lr decay"""
CHUNK = 1 << 20
"""elements at a time, which bounds what is made on the way"""
MASK32 = 0xFFFFFFFF
SECOND_HASH = 0x9E3779B9


def step_constants(
    betas_and_eps: Tensor,
    lr: float,
    weight_decay: float,
    step: Tensor,
    grad_scale: Tensor,
    do_update: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """What a step needs to know, made on the device. `rule` is float64 (beta1, beta2, eps), `step` counts from 1."""
    betas = betas_and_eps[:2]
    corrections = 1.0 - betas**step
    found = torch.empty(10, dtype=torch.float64, device=betas_and_eps.device)
    found[BETA1:EPS:2] = betas
    found[ONE_MINUS_BETA1:EPS:2] = 1.0 - betas
    found[EPS] = betas_and_eps[2]
    found[STEP_SIZE] = lr / corrections[0]
    found[RSQRT_CORRECTION] = corrections[1].rsqrt()
    found[DECAY_FACTOR].fill_(1.0 - lr * weight_decay)  # an assignment would wait for the device
    found[GRAD_SCALE] = grad_scale
    found[DO_UPDATE] = do_update
    return found.to(dtype)


def update(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    *,
    num_decayed: int,
    indices: ElementIndices,
) -> None:
    """Updates flat tensors of one length, of which the first `decayed` elements decay.

    `high` is the weights, or with `low` their upper halves (halves.py); in bfloat16 alone they are rounded by chance.
    `place` numbers the elements, and `step` the step, for the hash.
    """
    # Two ranges, since the second does not decay.
    for begin, end, decays in ((0, num_decayed, True), (num_decayed, len(high), False)):
        for start in range(begin, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            beside = None if low is None else low[part]
            moments = (exp_avg[part], exp_avg_sq[part])
            _update_chunk(high[part], beside, moments, gradient[part], constants, step, decays, indices.advance(start))


def _update_chunk(
    high: Tensor,
    low: Tensor | None,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    decays: bool,
    indices: ElementIndices,
) -> None:
    dtype, live = constants.dtype, constants[DO_UPDATE] != 0
    before = high.to(dtype) if low is None else join_halves(high, low)
    w, *found = adamw_step(before, moments[0].to(dtype), moments[1].to(dtype), gradient, constants, decays)
    short = {high.dtype, moments[0].dtype} - {dtype} if low is None else {moments[0].dtype} - {dtype}
    bits = random_bits(len(high), indices, step) if short else None
    # A product with 0 would not do: what is not written may be infinite.
    write_weights(high, low, torch.where(live, w, before), bits)
    for held, moment, shift in zip(moments, found, (0, 16), strict=True):
        if bits is not None and held.dtype != dtype:
            moment = stochastic_round(moment, (bits >> shift) & 0xFFFF)
        held.copy_(torch.where(live, moment, held))


def adamw_step(
    weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, constants: Tensor, decays: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, mean, square) after the step"""
    beta1, rest1, beta2, rest2, eps, size, root, shrink, scale, _ = constants.unbind()
    dtype = constants.dtype
    g = gradient.to(dtype) * scale
    m = exp_avg * beta1 + g * rest1
    v = exp_avg_sq * beta2 + g * g * rest2
    w = weights * shrink if decays else weights
    # torch rounds a root on a CPU to one of the two nearest floats; by way of float64 it is the nearest.
    return w - m * size / (v.double().sqrt().to(dtype) * root + eps), m, v


def write_weights(high: Tensor, low: Tensor | None, w: Tensor, bits: Tensor | None) -> None:
    """`bits` are for weights in bfloat16 alone; those that need no rounding stay what they are."""
    if low is not None:
        split_halves(w, high, low)
    elif high.dtype == w.dtype or bits is None:
        high.copy_(w)
    else:
        high.copy_(stochastic_round(w, second_hash_bits(bits)))


def random_bits(count: int, indices: ElementIndices, step: Tensor) -> Tensor:
    """int64 [count] of 32 random bits, by element and step."""
    return hash32((indices.compute(count, step.device) & MASK32) ^ hash32((step ^ indices.key) & MASK32))


def second_hash_bits(bits: Tensor) -> Tensor:
    """16 random bits more, of 32."""
    return hash32(bits ^ SECOND_HASH) & 0xFFFF


def hash32(x: Tensor) -> Tensor:
    """32 bits of an int64, well mixed. (The constants are Ellis's, found by search for the least bias.)"""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """bfloat16 of a float: away from zero where the part that is cut off exceeds 16 random bits."""
    x = x.float()
    whole = torch.where(x.isnan(), QUIET_NAN, x.view(torch.int32))
    return ((whole + bits.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
