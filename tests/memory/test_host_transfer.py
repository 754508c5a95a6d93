"""Copies that come as late as they may: whoever reads too early, or lets go of memory too early, is seen on a CPU too.

On a GPU a copy happens some time between being asked for and being waited for. Here it happens when it is waited for,
and until then the link holds neither end of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_engines import SHAPE, engine_away, stepped
from tiny_engines import batch_of, largest_error, whole
from torch import Tensor

from echelon.memory.offload.host_transfer import DOWN, UP, CopyEvent, HostLink
from echelon.parallel.dp import offload_policy
from echelon.parallel.dp.offload_host import OffloadHost
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.engine_state import training_state


class Late(CopyEvent):
    def __init__(self, link: LateLink, way: str):
        super().__init__()
        self.link, self.way, self.through = link, way, False

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self.link.work_until(self)


class LateLink(HostLink):
    """One queue for each way, as streams are."""

    made = 0

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._queues: dict[str, deque[tuple[Late, Callable[[], None]]]] = {DOWN: deque(), UP: deque()}
        self._one = threading.RLock()

    def _copy(
        self,
        direction: str,
        source: Tensor,
        target: Tensor,
        category: str,
        after: CopyEvent | None,
        factor: Tensor | None,
    ) -> CopyEvent:
        read, write = remembered(source), remembered(target)

        def copy() -> None:
            found = read()
            if factor is not None:
                found.mul_(factor)
            write().copy_(found)

        with self._one:
            self.bytes_moved[direction, category] += source.nbytes
            late = Late(self, direction)
            self._queues[direction].append((late, copy))
            LateLink.made += 1
        return late

    def work_until(self, late: Late) -> None:
        with self._one:
            while not late.through:
                one, copy = self._queues[late.way].popleft()
                copy()
                one.through = True


def remembered(tensor: Tensor) -> Callable[[], Tensor]:
    """The tensor, if its memory is still there."""
    storage, nbytes = weakref.ref(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
    like: tuple[Any, ...] = (tensor.storage_offset(), tensor.size(), tensor.stride())
    dtype = tensor.dtype

    def again() -> Tensor:
        found = storage()
        assert found is not None, "memory was freed during its copy"
        assert found.nbytes() == nbytes, "memory was given away while a copy of it was under way"
        return torch.empty(0, dtype=dtype).set_(found, *like)

    return again


LAYOUTS = (
    "dp=1,offload=optimizer",
    "dp=1,accumulate=2,offload=optimizer+activations",
    "dp=1,accumulate=2,offload=params",
    "dp=1,recompute=full,offload=params+activations",
    "dp=1,accumulate=2,recompute=ops,offload=params+activations+disk",
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_late_copies_do_not_change_a_step(monkeypatch: pytest.MonkeyPatch, layout: str, share: float) -> None:
    plain = stepped(engine_away(layout.rpartition(",")[0]))
    monkeypatch.setattr(offload_policy, "HostLink", LateLink)
    before = LateLink.made
    late = stepped(engine_away(layout, host_share=share))
    assert largest_error(whole(late.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
    assert largest_error(whole(late.parallel), whole(plain.parallel)) <= 1e-10
    losses = [engine.evaluate(engine.microbatches(batch_of(SHAPE, 4, seed=7))) for engine in (plain, late)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert LateLink.made > before


def test_activations_that_are_never_read_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_policy, "HostLink", LateLink)
    engine = engine_away("dp=1,offload=activations")
    for seed in range(3):
        total, _ = engine.model(**batch_of(SHAPE, 4, seed=seed))
        if seed:
            torch.autograd.grad(total, [p for p in engine.model.parameters() if p.requires_grad][-1:])
        del total  # the rest of backward never comes
    stepped(engine)
    plain = stepped(engine_away("dp=1"))
    assert largest_error(whole(engine.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10


def loaded(engine: Engine) -> float | None:
    """All parameters are set, as by a checkpoint. The loss that follows from them."""
    engine.drain()
    for item in training_state(engine).items(restoring=True):
        if item.name.startswith("model."):
            item.write(torch.linspace(-0.2, 0.3, item.size, dtype=item.dtype))
    return engine.evaluate(engine.microbatches(batch_of(SHAPE, 4, seed=7)))


@pytest.mark.parametrize("kind", ["optimizer", "optimizer+disk", "params", "params+disk"])
def test_loaded_weights_are_not_overwritten_by_older_copies(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """With states on disk, those that the last update had sent up came after them."""
    expected = loaded(stepped(engine_away("dp=1")))
    monkeypatch.setattr(offload_policy, "HostLink", LateLink)
    assert loaded(stepped(engine_away(f"dp=1,offload={kind}"))) == pytest.approx(expected, rel=1e-12)


class Noted(CopyEvent):
    is_done = False

    def synchronize(self) -> None:
        self.is_done = True


def test_the_host_writes_after_a_copy_completes() -> None:
    """It writes at once: that the device waits for the copy is not enough."""
    engine = stepped(engine_away("dp=1,offload=params"))
    engine.drain()
    noted = []
    for unit in engine.parallel.sharded_model.param_groups:
        assert unit.offloaded is not None
        unit.offloaded.params.copy = Noted()
        noted.append(unit.offloaded.params.copy)
    loaded(engine)
    assert all(copy.is_done for copy in noted)


def test_the_worker_sets_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that it locked, and streams that it left, were those of the first GPU, on every rank."""
    found = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device))
    )
    link, unit = HostLink(torch.device("cpu")), engine_away("dp=1").parallel.sharded_model.param_groups[0].spec
    link.on_gpu, link.device = True, torch.device("cuda", 1)
    OffloadHost(link, [unit], ParallelOptions(), "optimizer").worker.stop()
    assert found == [("echelon-host", torch.device("cuda", 1))]
