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

This file is plain torch, on any device, in chunks; adamw_gpu.py is the same as one kernel. They agree bit for bit: the
kernel is compiled without fused multiply-adds, and with exact roots and divisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels.halves import QUIET_NAN, joined, split_into

BETA1, REST1, BETA2, REST2, EPS, SIZE, ROOT, SHRINK, SCALE, LIVE = range(10)
"""places in `numbers`; SIZE is lr / (1 - beta1^t), ROOT 1 / sqrt(1 - beta2^t), SHRINK 1 - lr decay"""
CHUNK = 1 << 20
"""elements at a time, which bounds what is made on the way"""
MASK = 0xFFFFFFFF


def numbers_of(
    rule: Tensor, lr: float, weight_decay: float, step: Tensor, scale: Tensor, live: Tensor, dtype: torch.dtype
) -> Tensor:
    """What a step needs to know, made on the device. `rule` is float64 (beta1, beta2, eps), `step` counts from 1."""
    betas = rule[:2]
    corrections = 1.0 - betas**step
    found = torch.empty(10, dtype=torch.float64, device=rule.device)
    found[BETA1:EPS:2] = betas
    found[REST1:EPS:2] = 1.0 - betas
    found[EPS] = rule[2]
    found[SIZE] = lr / corrections[0]
    found[ROOT] = corrections[1].rsqrt()
    found[SHRINK].fill_(1.0 - lr * weight_decay)  # an assignment would wait for the device
    found[SCALE] = scale
    found[LIVE] = live
    return found.to(dtype)


def update(
    high: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    step: Tensor,
    *,
    decayed: int,
    first: int,
) -> None:
    """Updates flat tensors of one length, of which the first `decayed` elements decay.

    `high` is the weights, or with `low` their upper halves (halves.py); `first` numbers the first element, and `step`
    the step, for the hash.
    """
    # Two ranges, since the second does not decay.
    for begin, end, decays in ((0, decayed, True), (decayed, len(high), False)):
        for start in range(begin, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            beside = None if low is None else low[part]
            moments = (mean[part], square[part])
            _update_chunk(high[part], beside, moments, gradient[part], numbers, step, decays, first + start)


def _update_chunk(
    high: Tensor,
    low: Tensor | None,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    numbers: Tensor,
    step: Tensor,
    decays: bool,
    first: int,
) -> None:
    beta1, rest1, beta2, rest2, eps, size, root, shrink, scale, live = numbers.unbind()
    dtype = numbers.dtype
    before = high if low is None else joined(high, low)
    g = gradient.to(dtype) * scale
    m = moments[0].to(dtype) * beta1 + g * rest1
    v = moments[1].to(dtype) * beta2 + g * g * rest2
    w = before * shrink if decays else before
    # torch rounds a root on a CPU to one of the two nearest floats; by way of float64 it is the nearest.
    w = w - m * size / (v.double().sqrt().to(dtype) * root + eps)
    # A product with 0 would not do: what is not written may be infinite.
    w = torch.where(live != 0, w, before)
    if low is None:
        high.copy_(w)
    else:
        split_into(w, high, low)
    bits = None if moments[0].dtype == dtype else random_bits(len(high), first, step)
    for place, moment, shift in ((moments[0], m, 0), (moments[1], v, 16)):
        short = moment if bits is None else rounded_by_chance(moment, (bits >> shift) & 0xFFFF)
        place.copy_(torch.where(live != 0, short, place))


def random_bits(count: int, first: int, step: Tensor) -> Tensor:
    """int64 [count] of 32 random bits, by element and step."""
    index = (torch.arange(count, device=step.device) + first) & MASK
    return hashed(index ^ hashed(step & MASK))


def hashed(x: Tensor) -> Tensor:
    """32 bits of an int64, well mixed. (The constants are Ellis's, found by search for the least bias.)"""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def rounded_by_chance(x: Tensor, bits: Tensor) -> Tensor:
    """bfloat16 of a float: away from zero where the part that is cut off exceeds 16 random bits."""
    x = x.float()
    whole = torch.where(x.isnan(), QUIET_NAN, x.view(torch.int32))
    return ((whole + bits.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
