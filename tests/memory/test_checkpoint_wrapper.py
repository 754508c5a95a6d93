"""Modules that are repeated, of a user's own kind: what is seen, what is refused, what is passed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engines import SGD, float64, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import echelon as ec
from echelon.training.engine import Engine


class Own(nn.Module):
    """Layers read what the layer before them made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))
            for _ in range(5)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum(), len(x)


class Residual(Own):
    """Something is computed between layers."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum(), len(x)


class InPlace(Own):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5)
        return x.square().sum(), len(x)


class Nested(Own):
    """Its own checkpoints are inside of ours."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = Nested.again(layer.forward)

    @staticmethod
    def again(forward: Any) -> Any:
        return lambda x: checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


class Skips(Own):
    """Layers are left out, and one reads what an early one made."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        first = self.layers[0](x)
        x = self.layers[1](first)
        x = self.layers[4](x + first)
        return x.square().sum(), len(x)


class FromTorch(nn.Module):
    """Draws from torch's own generator, which no module tells us."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) * torch.rand_like(x)


class Draws(Own):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer[3] = FromTorch()


def own_gradients(kind: type[Own], recompute: str) -> list[Tensor]:
    torch.manual_seed(0)
    engine = Engine(kind().double(), f"recompute={recompute}", SGD, options=float64())
    engine.model.train()
    engine.step({"x": torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))})
    return list(whole(engine.parallel).values())


@pytest.mark.parametrize("recompute", ["full", "every:2", "sqrt", "ops", "budget:1GiB", "budget:0.00004GiB"])
@pytest.mark.parametrize("kind", [Own, Residual, Nested, Skips, Draws])
def test_a_custom_model(kind: type[Own], recompute: str) -> None:
    if kind is Skips and recompute.startswith("budget"):
        with pytest.raises(ValueError, match=r"did not call layers\.2"):
            own_gradients(kind, recompute)
    elif kind is Residual and recompute in ("every:2", "sqrt"):
        with pytest.raises(ValueError, match=r"layers\.1 reads no output of layers\.0.* use recompute=full"):
            own_gradients(kind, recompute)
    elif not (kind is Nested and recompute == "ops"):  # torch's own checkpoints do not nest in its selective ones
        for found, expected in zip(own_gradients(kind, recompute), own_gradients(kind, "none"), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "full", "ops", "budget:1GiB"])
def test_rerun_and_rehearsal_restore_the_generator(recompute: str) -> None:
    own_gradients(Draws, recompute)
    found = torch.get_rng_state()
    own_gradients(Draws, "none")
    assert torch.equal(found, torch.get_rng_state())


def test_an_output_modified_in_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an output of layers\.0 was modified in place"):
        own_gradients(InPlace, "every:2")


def test_selective_requires_core_attention() -> None:
    with pytest.raises(ValueError, match=r"attention of layers\.0 .* use recompute=ops or full"):
        Engine(Own(), "recompute=selective")


def test_checkpointing_in_a_custom_loop() -> None:
    for recompute in ("every:2", "budget:0.00003GiB"):
        grads = []
        for kind in ("none", recompute):
            torch.manual_seed(0)
            model = ec.wrap(Own().double(), f"recompute={kind}")
            total, _ = model(torch.ones(8, 16, dtype=torch.float64))
            total.backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Notes(nn.Module):
    """Notes whether it runs under autocast."""

    def __init__(self, notes: list[bool]) -> None:
        super().__init__()
        self.scale, self.notes = nn.Parameter(torch.ones(4)), notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(torch.is_autocast_enabled("cpu"))
        return x * self.scale.exp()


def test_autocast_is_restored_for_the_rerun() -> None:
    notes: list[bool] = []
    model = ec.wrap(nn.Sequential(*(Notes(notes) for _ in range(3))), "recompute=every:2")
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.ones(2, 4))
    out.sum().backward()
    assert notes == [True] * 6


def flops(recompute: str) -> int:
    engine = Engine(Own(), f"recompute={recompute}", SGD)
    with FlopCounterMode(display=False) as counter:
        engine.step({"x": torch.randn(8, 16)})
    return int(counter.get_total_flops())


def test_a_custom_model_recomputes_operators_and_no_gemm() -> None:
    none, ops, full, every = (flops(kind) for kind in ("none", "ops", "full", "every:2"))
    forward = 5 * 2 * 8 * (16 * 64 * 2)
    last = 2 * 8 * 64 * 16  # of a segment's last layer: nothing reads what it gives
    assert ops == none
    assert full - none == forward - 5 * last
    assert every - none == forward - 3 * last
