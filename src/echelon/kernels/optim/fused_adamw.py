"""AdamW in one pass: weights, moments and gradient are read once, weights and moments written once.

    g = gradient * grad_scale
    m = beta1 m + (1 - beta1) g                   v = beta2 v + (1 - beta2) g g
    w = w (1 - lr decay) - (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

as `torch.optim.AdamW`. What changes from step to step is in a small tensor on the device (`constants`), so callers need
not wait for the device to learn a step count, a norm, or whether the step has valid targets: where `do_update` is 0,
nothing is written.

[Note: stochastic rounding]

With beta2 = 0.999 a step changes v by at most a thousandth, and bfloat16 has 8 bits: rounded to nearest, v would never
decrease. So moments in bfloat16 use stochastic rounding (stochastic_round.py): the lower 16 random bits are for m, the
upper 16 for v. The update itself reads m and v before they are rounded.

Weights in bfloat16 without the low half of their bits are rounded stochastically too, by 16 bits of a second hash. With
a small learning rate most updates are below half of a weight's last bit, and rounding to nearest would lose them.

This file is plain torch, on any device, in chunks; fused_adamw_triton.py is the same as one kernel. They agree bit for
bit: the kernel is compiled without fused multiply-adds, and with correctly rounded square roots and divisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels.optim.split_fp32 import join_halves, split_halves
from echelon.kernels.optim.stochastic_round import ElementIndices, random_bits, second_hash_bits, stochastic_round

BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, EPS = range(5)
STEP_SIZE, RSQRT_CORRECTION, DECAY_FACTOR, GRAD_SCALE, DO_UPDATE = range(5, 10)
"""positions in `constants`; STEP_SIZE is lr / (1 - beta1^t), RSQRT_CORRECTION 1 / sqrt(1 - beta2^t), DECAY_FACTOR
1 - lr decay"""
CHUNK = 1 << 20
"""elements at a time, which bounds temporary memory"""


def step_constants(
    betas_and_eps: Tensor,
    lr: float,
    weight_decay: float,
    step: Tensor,
    grad_scale: Tensor,
    do_update: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute a step's constants on the device. `betas_and_eps` is float64 [3], and `step` counts from 1."""
    betas = betas_and_eps[:2]
    corrections = 1.0 - betas**step
    constants = torch.empty(10, dtype=torch.float64, device=betas_and_eps.device)
    constants[BETA1:EPS:2] = betas
    constants[ONE_MINUS_BETA1:EPS:2] = 1.0 - betas
    constants[EPS] = betas_and_eps[2]
    constants[STEP_SIZE] = lr / corrections[0]
    constants[RSQRT_CORRECTION] = corrections[1].rsqrt()
    constants[DECAY_FACTOR].fill_(1.0 - lr * weight_decay)  # an assignment would synchronise with the device
    constants[GRAD_SCALE] = grad_scale
    constants[DO_UPDATE] = do_update
    return constants.to(dtype)


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
    """Update flat tensors of one length, of which the first `num_decayed` elements have weight decay.

    `high` is the weights, or with `low` their upper halves (split_fp32.py); bfloat16 weights alone are rounded
    stochastically. `indices` and `step` seed the random bits.
    """
    for begin, end, decays in ((0, num_decayed, True), (num_decayed, len(high), False)):
        for start in range(begin, end, CHUNK):
            chunk = slice(start, min(start + CHUNK, end))
            weights, moments = (high[chunk], None if low is None else low[chunk]), (exp_avg[chunk], exp_avg_sq[chunk])
            _update_chunk(weights, moments, gradient[chunk], constants, step, decays, indices.advance(start))


def _update_chunk(
    weights: tuple[Tensor, Tensor | None],
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    decays: bool,
    indices: ElementIndices,
) -> None:
    (high, low), dtype, do_update = weights, constants.dtype, constants[DO_UPDATE] != 0
    before = high.to(dtype) if low is None else join_halves(high, low)
    w, *new_moments = adamw_step(before, moments[0].to(dtype), moments[1].to(dtype), gradient, constants, decays)
    rounded_dtypes = {high.dtype, moments[0].dtype} if low is None else {moments[0].dtype}
    bits = random_bits(len(high), indices, step) if rounded_dtypes - {dtype} else None
    # Multiplying by 0 would not do: discarded values may be infinite.
    write_weights(high, low, torch.where(do_update, w, before), bits)
    for state, moment, shift in zip(moments, new_moments, (0, 16), strict=True):
        if bits is not None and state.dtype != dtype:
            moment = stochastic_round(moment, (bits >> shift) & 0xFFFF)
        state.copy_(torch.where(do_update, moment, state))


def adamw_step(
    weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, constants: Tensor, decays: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights, exp_avg, exp_avg_sq) after the step."""
    beta1, rest1, beta2, rest2, eps, step_size, correction, decay_factor, grad_scale, _ = constants.unbind()
    dtype = constants.dtype
    g = gradient.to(dtype) * grad_scale
    m = exp_avg * beta1 + g * rest1
    v = exp_avg_sq * beta2 + g * g * rest2
    w = weights * decay_factor if decays else weights
    # On a CPU torch's float32 sqrt is not correctly rounded; by way of float64 it is.
    return w - m * step_size / (v.double().sqrt().to(dtype) * correction + eps), m, v


def write_weights(high: Tensor, low: Tensor | None, w: Tensor, bits: Tensor | None) -> None:
    """Write updated weights; `bits` round bfloat16 weights stochastically. Representable values do not change."""
    if low is not None:
        split_halves(w, high, low)
    elif high.dtype == w.dtype or bits is None:
        high.copy_(w)
    else:
        high.copy_(stochastic_round(w, second_hash_bits(bits)))
