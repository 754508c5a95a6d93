"""Recomputation keeps less: that it computes the same is test_transparency_options.py's business."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from echelon import models
from echelon.models import sizes
from echelon.train.engine import Engine


class Own(nn.Module):
    """A module that knows nothing of us."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum(), len(x)


def kept(model: nn.Module, recompute: str, batch: dict[str, Tensor]) -> int:
    """Bytes that forward leaves for backward, every storage once, parameters left out."""
    engine = Engine(model, f"recompute={recompute}")
    engine.model.train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        total, _ = engine.model(**engine.prepared(next(engine.microbatches(batch))))
    found_bytes = sum(found.values())
    total.backward()
    return found_bytes


@pytest.mark.parametrize(("name", "share"), [("llama-tiny", 0.8), ("gpt-tiny", 0.85)])
def test_ops_keeps_less_than_none_and_more_than_full(name: str, share: float) -> None:
    size = replace(sizes.find(name), dropout=0.0)
    tokens = torch.randint(0, size.vocab, (4, 65))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    whole, some, least = (kept(models.build(size, "meta"), kind, batch) for kind in ("none", "ops", "full"))
    assert least < some < share * whole


def test_a_module_of_ones_own_repeats_operators_and_no_product() -> None:
    found = []
    for kind in ("none", "ops", "full"):
        engine = Engine(Own(), f"recompute={kind}")
        with FlopCounterMode(display=False) as flops:
            engine.step({"x": torch.randn(8, 64)})
        found.append(flops.get_total_flops())
    none, ops, full = found
    assert ops == none < full
