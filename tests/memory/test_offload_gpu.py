"""On a GPU, where copies run beside compute: the same values as without any of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_engines import batch_of, largest_error, tiny, whole
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.memory.offload.host_transfer import HostLink
from echelon.optim import paged_optimizer
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


# -- the order of streams ---------------------------------------------------------------------------------------------


def long_kernels() -> Tensor:
    """Queue work that takes the device a good while longer than a small copy."""
    x = torch.ones(4096, 4096, device="cuda") / 4096
    for _ in range(40):
        x = x @ x
    return x


@needs_gpu
def test_a_copy_to_the_host_waits_for_the_kernel_that_writes_its_source() -> None:
    """Without an event of the compute stream the copy stream runs at once, and the host gets zeros."""
    link = HostLink(torch.device("cuda"))
    source, target = torch.zeros(1 << 10, device="cuda"), link.empty_pinned(1 << 10, torch.float32)
    torch.cuda.synchronize()
    for number in range(1, 6):
        source.fill_(0).add_(long_kernels()[0, 0] * 0 + number)
        link.copy_to_host(source, target, "test").synchronize()
        assert target.eq(number).all()


@needs_gpu
def test_a_copy_to_the_device_waits_for_the_kernels_that_read_its_target() -> None:
    link = HostLink(torch.device("cuda"))
    source, target = link.empty_pinned(1 << 10, torch.float32), torch.zeros(1 << 10, device="cuda")
    for number in range(1, 6):
        source.fill_(number)
        seen = long_kernels()[0, 0] * 0 + target
        copy = link.copy_to_device(source, target, "test")
        copy.wait()
        assert seen.eq(number - 1).all()
        assert target.eq(number).all()
        copy.synchronize()  # before the host writes the next number


@needs_gpu
def test_a_closed_engine_has_no_copy_under_way() -> None:
    options = ParallelOptions(device=torch.device("cuda"), host_share=1.0)
    engine = Engine(models.build(SHAPE, "meta"), "dp=1,offload=optimizer", options=options)
    engine.step(batch_of(SHAPE, 4, 512))
    engine.close()
    assert engine.parallel.offload.host is not None
    assert all(stream.query() for stream in engine.parallel.offload.host.link._streams.values())


def moved_by(name: str, layout: str, options: ParallelOptions) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters before and after two steps of a matrix optimizer."""
    rule = OptimizerConfig(name=name, lr=1e-2)
    engine = Engine(models.build(SHAPE, "meta"), f"dp=1,{layout}", rule, clip=1.0, options=options)
    before = {key: value.cpu() for key, value in whole(engine.parallel, "master").items()}
    for step in range(2):
        engine.step(batch_of(SHAPE, 4, 512, seed=step))
    engine.drain()
    after = {key: value.cpu() for key, value in whole(engine.parallel, "master").items()}
    engine.close()
    return before, after


@needs_gpu
@pytest.mark.parametrize("kind", ["optimizer", "params", "disk"])
@pytest.mark.parametrize("name", ["lamb", "adafactor", "sm3", "muon"])
def test_pages_of_states_equal_the_gpu(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page for each group: a copy that is not waited for would move weights by states of another step."""
    monkeypatch.setattr(paged_optimizer, "PAGE_BYTES", 1)
    options = ParallelOptions(device=torch.device("cuda"), host_share=1.0)
    before, plain = moved_by(name, "accumulate=2", options)
    _, away = moved_by(name, f"accumulate=2,offload={kind}", options)
    for key, start in before.items():
        moved = float((plain[key] - start).norm())
        assert float((away[key] - plain[key]).norm()) <= 0.02 * moved, key
