"""Layouts with compression equal one device with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_engines import SGD, largest_error, whole
from torch import Tensor, nn

from echelon import models
from echelon.data.synthetic_images import synthetic_images
from echelon.launch.rank_pool import RankPool
from echelon.models import model_config
from echelon.models.vision import cnn
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

LLAMA = replace(model_config.find_model("llama-tiny"), layers=2, dropout=0.1)


def trained(name: str, layout: str, compress: str) -> dict[str, Tensor]:
    """Parameters after two steps in float64."""
    torch.manual_seed(0)
    options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64, compress=compress)
    model: nn.Module
    if name == "vgg":
        pixels, labels = synthetic_images(torch.arange(4), side=32, classes=10)
        model, batch = cnn.vgg16(10, 32, 1 / 16), {"images": pixels, "labels": labels}
    else:
        model, tokens = models.build(LLAMA, "meta"), torch.randint(0, LLAMA.vocab, (4, 33))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    engine = Engine(model, layout, SGD, options=options)
    engine.model.train()
    for _ in range(2):
        engine.step(batch)
    return whole(engine.parallel, "master")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("vgg", "dp=2,zero=3"),
        ("llama", "dp=2,zero=3,recompute=full"),
        ("llama", "dp=1,pp=2,accumulate=2,schedule=zb-h1"),
    ],
)
def test_layouts_with_compression_equal_one_device_with_it(pool: RankPool, name: str, layout: str) -> None:
    compress = "lossless+int8"
    found = pool.run(trained, 2, name, layout, compress)[0]
    alone = ",".join(part for part in layout.split(",") if part.startswith("recompute"))
    truth = trained(name, alone, compress)
    assert largest_error(found, truth) < 1e-10
    if name == "llama":  # it is not that nothing was rounded
        assert largest_error(truth, trained(name, alone, "none")) > 1e-6


def test_ranks_with_lossless_compression_change_nothing(pool: RankPool) -> None:
    found = pool.run(trained, 2, "vgg", "dp=2,zero=3", "lossless")[0]
    assert largest_error(found, trained("vgg", "", "none")) < 1e-10
