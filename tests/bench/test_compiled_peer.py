"""The plain loop that needs no installation: it is the model that we measure, and trains it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon import models
from echelon.bench.measurement import Measurement
from echelon.bench.peers import compiled
from echelon.bench.reference_shapes import reference_model


def measurement(size: str, recompute: str = "none") -> Measurement:
    return Measurement(
        who="compiled", shape="tiny", size=size, seq_len=32, batch=2, precision="fp32", recompute=recompute
    )


@pytest.mark.parametrize("size", ["gpt-tiny", "llama-tiny"])
def test_the_plain_loop_trains_with_and_without_recomputation(size: str) -> None:
    losses = {}
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        step = compiled.prepare(measurement(size, recompute))
        losses[recompute] = [step()() for _ in range(4)]
    assert losses["none"][-1] < losses["none"][0]
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-6)


@pytest.mark.parametrize("size", ["gpt2-124m", "llama-1b"])
def test_the_plain_model_has_our_parameters_but_for_the_padding(size: str) -> None:
    config = reference_model(size, 64)
    with torch.device("meta"):
        plain = compiled.PlainModel(config)
    rows = plain.embed.weight.shape[0] - config.vocab
    assert 0 <= rows < 64
    padding = rows * config.width * (1 if config.tied else 2)
    ours = models.build(config, "meta")
    assert sum(p.numel() for p in plain.parameters()) - padding == sum(p.numel() for p in ours.parameters())


def test_models_that_the_plain_loop_has_not_are_refused() -> None:
    moe = replace(measurement("gpt-tiny"), size="moe-tiny")
    with pytest.raises(ValueError, match=r"the plain loop has no such model \(moe-tiny\)"):
        compiled.prepare(moe)
