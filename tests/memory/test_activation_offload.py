"""Activations on the host: what crosses, what the device holds, and what stays."""

from __future__ import annotations

import pytest
import torch
from live_tensor_bytes import LivingBytes
from offload_engines import SHAPE, engine_away, link_of, stepped
from tiny_engines import batch_of, engine_of, tiny
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.memory.offload.activation_offload import ActivationOffloader
from echelon.memory.offload.host_transfer import DOWN, UP, HostLink


@pytest.mark.parametrize(("recompute", "accumulate"), [("full", 1), ("full", 2), ("none", 1)])
def test_all_layers_but_the_last_are_offloaded_and_fetched(recompute: str, accumulate: int) -> None:
    engine = stepped(engine_away(f"dp=1,accumulate={accumulate},recompute={recompute},offload=activations"), 1)
    moved = dict(link_of(engine).bytes_moved)
    assert moved[DOWN, "activations"] == moved[UP, "activations"] > 0
    if recompute == "full":  # a layer keeps its input; what layers share (positions) is small
        entry = 4 * 9 * SHAPE.width * 8
        assert moved[DOWN, "activations"] == (SHAPE.layers - 1) * entry
    stash = engine.parallel.offload.activation_offload
    assert stash is not None
    held = stash.pool.nbytes
    stepped(engine, 2)
    assert stash.pool.nbytes == held <= moved[DOWN, "activations"]  # used again from step to step


def test_the_device_holds_two_layers_of_activations() -> None:
    def peak(layers: int, offloaded: bool) -> int:
        shape = tiny(layers=layers, vocab=16)
        layout = "dp=1,offload=activations" if offloaded else "dp=1"
        engine = engine_of(shape, layout)
        engine.step(batch_of(shape, 2, length=32))
        stash = engine.parallel.offload.activation_offload
        with LivingBytes() as living:  # memory on the host was made in the first step
            engine.step(batch_of(shape, 2, length=32))
        return living.peak - (stash.pool.nbytes if stash is not None and stash.pool.nbytes > living.peak else 0)

    grown = [peak(8, offloaded) - peak(4, offloaded) for offloaded in (False, True)]
    assert grown[1] < 0.1 * grown[0], grown


def test_a_storage_is_offloaded_once_and_small_tensors_and_parameters_stay() -> None:
    stash = ActivationOffloader(HostLink(torch.device("cpu")), keep_last=False)
    weight = torch.randn(64, 64, requires_grad=True)
    stash.exclude([weight])

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ weight
            return (y.view(-1) * y.flatten()).view(x.shape) * x[:, :1].sum().tanh()

    model = nn.Sequential(Layer())
    x = torch.randn(64, 64, requires_grad=True)
    truth = torch.autograd.grad(model(x).sum(), (x, weight))
    stash.apply(model, ["0"])
    out = model(x)
    # x, y and what y times y made; neither the weight nor numbers.
    assert stash.link.bytes_moved == {(DOWN, "activations"): 3 * x.nbytes}
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), (x, weight)), truth, strict=True))
    assert stash.link.bytes_moved[UP, "activations"] == 3 * x.nbytes
    with torch.no_grad():
        model(x)
    assert stash.link.bytes_moved[DOWN, "activations"] == 3 * x.nbytes


def test_a_tensor_that_changes_in_place_is_offloaded_again() -> None:
    stash = ActivationOffloader(HostLink(torch.device("cpu")), keep_last=False)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * x
            first = y.sin()
            y.mul_(2)
            return first + y.cos()

    model, x = nn.Sequential(Layer()), torch.randn(64, 64, requires_grad=True)
    stash.apply(model, ["0"])
    (found,) = torch.autograd.grad(model(x).sum(), x)
    y = (x * x).detach()
    torch.testing.assert_close(found, (y.cos() - 2 * (2 * y).sin()) * 2 * x.detach())


def test_resident_tensors_are_freed_without_a_backward() -> None:
    """A small output that is saved by its own maker held the graph that held it."""
    stash = ActivationOffloader(HostLink(torch.device("cpu")), keep_last=False)
    saved: list[StorageWeakRef] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = x.tanh()
            saved.append(StorageWeakRef(made.untyped_storage()))
            return made

    model = nn.Sequential(Layer())
    stash.apply(model, ["0"])
    out = model(torch.randn(4, requires_grad=True) * 2)
    assert out.requires_grad
    del out
    assert saved[0].expired()
