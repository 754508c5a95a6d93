"""The scale's rule, on the device, against the same rule in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from echelon.precision.loss_scale import MAX_SCALE, MIN_SCALE, LossScale, LossScaler


def by_hand(start: float, every: int, steps: list[str]) -> list[tuple[float, int]]:
    scale, good, found = start, 0, []
    for step in steps:
        if step == "bad":
            scale, good = max(scale / 2, MIN_SCALE), 0
        elif step == "good":
            good += 1
            if good == every:
                scale, good = min(scale * 2, MAX_SCALE), 0
        found.append((scale, good))
    return found


@pytest.mark.parametrize(("start", "every"), [(65536.0, 3), (1.0, 1), (2.0**23, 2), (2.0**-23, 4)])
def test_the_loss_scale_follows_its_rule(start, every):
    steps = random.Random(every).choices(["good", "bad", "no target"], [5, 2, 1], k=200)
    scaling = LossScaler(LossScale.dynamic(start=start, every=every), torch.device("cpu"))
    found = []
    for step in steps:
        scaling.update(torch.tensor(step != "bad"), torch.tensor(step == "good"))
        found.append((float(scaling.scale), int(scaling.good_steps)))
    assert found == by_hand(start, every, steps)


def test_a_fixed_scale_stays():
    scaling = LossScaler(LossScale(start=8.0), torch.device("cpu"))
    scaling.update(torch.tensor(False), torch.tensor(False))
    assert float(scaling.scale) == 8.0


@pytest.mark.parametrize(("start", "every"), [(0.0, 0), (-1.0, 3), (float("inf"), 0), (float("nan"), 0), (1.0, -1)])
def test_an_invalid_loss_scale_is_refused(start, every):
    with pytest.raises(ValueError, match="a loss scale must be positive"):
        LossScale(start=start, every=every)


def test_a_loss_scale_prints_its_settings():
    assert [str(scale) for scale in (LossScale(), LossScale(start=1024), LossScale.dynamic())] == [
        "none",
        "1024, fixed",
        "dynamic, from 65536",
    ]
