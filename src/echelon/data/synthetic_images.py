"""Synthetic images that a model can learn: one random picture per class, plus noise per sample.

Every number is a function of (seed, sample), so any rank can generate any sample without a download.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon import rng

COARSE_SIDE = 8
"""side of a class's picture before it is upsampled"""


def synthetic_images(
    samples: Tensor, *, side: int, classes: int, seed: int = 0, noise: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Generate (images float32 [B, 3, side, side], labels int64 [B]) on the device of `samples`."""
    device = samples.device
    labels = rng.bits(rng.key(seed, "labels"), samples) % classes
    index = torch.arange(classes * 3 * COARSE_SIDE * COARSE_SIDE, device=device)
    pictures = rng.normal(rng.key(seed, "pictures"), index).view(classes, 3, COARSE_SIDE, COARSE_SIDE)
    large = F.interpolate(pictures, (side, side), mode="bilinear", align_corners=False)
    keys = rng.bits(rng.key(seed, "noise"), samples)
    grain = rng.normal(keys, torch.arange(3 * side * side, device=device)).view(-1, 3, side, side)
    return large[labels] + noise * grain, labels
