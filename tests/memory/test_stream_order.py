"""Every write and read of an offloaded tensor is ordered by a stream, an event or a job, whatever the GPU's timing."""

from __future__ import annotations

import gc

import pytest
import torch
from offload_engines import ADAMW, engine_away, stepped
from stream_order import StreamOrder, recorded_streams

from echelon.config.sections import OptimizerConfig
from echelon.memory.offload.host_transfer import CopyEvent
from echelon.memory.offload.host_worker import JobHandle
from echelon.optim import paged_optimizer
from echelon.training.engine import Engine

LAYOUTS = (
    "dp=1,offload=optimizer",
    "dp=1,accumulate=2,offload=optimizer+activations",
    "dp=1,accumulate=2,offload=params",
    "dp=1,recompute=full,offload=params+activations",
    "dp=1,accumulate=2,offload=activations",
)


def mark_host_tensors(engine: Engine, order: StreamOrder) -> None:
    for group in engine.parallel.sharded_model.param_groups:
        if group.offloaded is not None:
            states = group.offloaded.states
            for tensor in (*states.tensors(), group.offloaded.grads.buffer, group.offloaded.params.host_shard):
                if tensor is not None:
                    order.mark_host(tensor)
    order.forget()


def trained_in_order(
    monkeypatch: pytest.MonkeyPatch, layout: str, share: float | None = None, rule: OptimizerConfig = ADAMW
) -> StreamOrder:
    with recorded_streams(monkeypatch) as order:
        engine = engine_away(layout, rule, host_share=share)
        mark_host_tensors(engine, order)
        stepped(engine, steps=2)
        engine.drain()
        engine.close()
        del engine
        gc.collect()  # its memory is freed here, with the last copies of its parameters behind it
    return order


@pytest.mark.parametrize(("layout", "share"), [*((layout, None) for layout in LAYOUTS), (LAYOUTS[1], 0.4)])
def test_copies_and_kernels_are_ordered(monkeypatch: pytest.MonkeyPatch, layout: str, share: float | None) -> None:
    order = trained_in_order(monkeypatch, layout, share)
    assert order.races == []
    assert order.checked > 1000


@pytest.mark.parametrize("layout", ["dp=1,offload=optimizer", "dp=1,accumulate=2,offload=params"])
@pytest.mark.parametrize("name", ["lamb", "adafactor", "sm3", "muon"])
def test_pages_of_states_are_ordered(monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    """The first copy of a page to the host once overtook its copy to the device: weights began as stale memory."""
    monkeypatch.setattr(paged_optimizer, "PAGE_BYTES", 1)
    order = trained_in_order(monkeypatch, layout, rule=OptimizerConfig(name=name, lr=1e-2))
    assert order.races == []
    assert order.checked > 1000


def test_a_copy_that_does_not_wait_for_compute_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start.wait(stream)`: the gradient may not be complete when it is copied."""
    wait = CopyEvent.wait
    monkeypatch.setattr(CopyEvent, "wait", lambda event, stream=None: None if stream is not None else wait(event))
    races = trained_in_order(monkeypatch, "dp=1,offload=optimizer").races
    assert any("copy stream" in race and "without waiting for" in race for race in races)


def test_compute_that_does_not_wait_for_a_copy_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = CopyEvent.wait
    monkeypatch.setattr(CopyEvent, "wait", lambda event, stream=None: wait(event, stream) if stream else None)
    races = trained_in_order(monkeypatch, "dp=1,offload=activations").races
    assert any("compute stream runs" in race for race in races)
    assert any("is freed while copy stream" in race for race in races)


def test_a_host_that_does_not_wait_for_a_copy_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyEvent, "synchronize", lambda event: None)
    races = trained_in_order(monkeypatch, "dp=1,accumulate=2,offload=params").races
    assert any("host thread runs" in race for race in races)


def test_a_step_that_does_not_wait_for_the_worker_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's job has ended by then, as it often has: what is missing is the order."""
    with recorded_streams(monkeypatch) as order:
        engine = engine_away("dp=1,accumulate=2,offload=params")
        mark_host_tensors(engine, order)
        monkeypatch.setattr(order, "waited_for", lambda handle: None)
        monkeypatch.setattr(JobHandle, "wait", lambda handle: handle._event.wait())
        stepped(engine, steps=2)
        engine.close()
    assert any("without waiting for" in race for race in order.races)


def test_the_checker_sees_writes_reads_and_views(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_streams(monkeypatch) as order:
        source = torch.zeros(8)
        other = torch.cuda.Event()
        side = type(order.compute)(order, "side")
        with torch.cuda.stream(side):
            source[:4].add_(1)  # zeros were queued on the compute stream: a race
        assert len(order.races) == 1
        other.record(side)
        source[4:].add_(1)  # other bytes: none
        assert len(order.races) == 1
        order.compute.wait_event(other)
        source.sum()
        assert len(order.races) == 1
        with torch.cuda.stream(side):
            source.mul_(2)
    assert len(order.races) >= 2
