"""On a GPU, where copies run beside compute: the same values as without any of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_engines import batch_of, largest_error, tiny, whole
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

SHAPE = tiny(layers=6, width=1024, heads=8, kv_heads=4, ffn=2816, vocab=8001, max_seq_len=512)
KINDS = ("optimizer", "params", "activations", "disk", "params+disk", "optimizer+activations", "params+activations")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def trained(layout: str, share: float | None = None) -> dict[str, Tensor]:
    """Masters after a few steps of SGD, to which small gradients are small: AdamW would enlarge what is rounded."""
    options = ParallelOptions(device=torch.device("cuda"), host_share=share)
    rule = OptimizerConfig(name="sgd", lr=1e-1, momentum=0.9)
    engine = Engine(models.build(SHAPE, "meta"), f"dp=1,{layout}", rule, clip=1.0, options=options)
    for step in range(4):
        engine.step(batch_of(SHAPE, 4, 512, seed=step))
    engine.drain()
    found = {name: value.cpu() for name, value in whole(engine.parallel, "master").items()}
    engine.close()
    return found


@cache
def truth(layout: str) -> dict[str, Tensor]:
    return trained(layout)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpu_with_its_host_equals_the_gpu(kind: str, accumulate: int, recompute: str) -> None:
    layout = f"accumulate={accumulate},recompute={recompute}"
    for share in (1.0, 0.5):
        found = trained(f"{layout},offload={kind}", None if kind == "activations" else share)
        assert largest_error(found, truth(layout)) < 1e-5
