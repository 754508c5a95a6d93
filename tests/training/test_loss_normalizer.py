"""What a step leaves to the next: the number of targets and the loss scale."""

from __future__ import annotations

from typing import Any

import torch

from echelon.precision.loss_scale import LossScale
from echelon.training.loss_normalizer import LossNormalizer


def test_a_step_without_targets_is_no_good_step_of_the_loss_scale() -> None:
    axis: Any = None  # only `reduce` needs one
    normalizer = LossNormalizer(axis, LossScale.dynamic(start=8.0, every=2), torch.device("cpu"))
    scales = []
    for targets in (3.0, 0.0, 0.0, 0.0, 5.0):
        normalizer.end_step(torch.tensor([1.0, targets], dtype=torch.float64), torch.tensor(True))
        scales.append(float(normalizer.loss_scaler.scale))
    assert scales == [8.0, 8.0, 8.0, 8.0, 16.0]
