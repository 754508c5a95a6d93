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
from away import SHAPE, engine_away, stepped
from laid_out import batch_of, largest_error, whole
from torch import Tensor

from echelon.memory.link import DOWN, UP, Link, Moving
from echelon.parallel import away


class Late(Moving):
    def __init__(self, link: LateLink, way: str):
        super().__init__()
        self.link, self.way, self.through = link, way, False

    def wait(self) -> None:
        self.done()

    def done(self) -> None:
        self.link.work_until(self)


class LateLink(Link):
    """One queue for each way, as streams are."""

    made = 0

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._queues: dict[str, deque[tuple[Late, Callable[[], None]]]] = {DOWN: deque(), UP: deque()}
        self._one = threading.RLock()

    def _copy(
        self, way: str, source: Tensor, target: Tensor, kind: str, after: Moving | None, factor: Tensor | None
    ) -> Moving:
        read, write = remembered(source), remembered(target)

        def copy() -> None:
            found = read()
            if factor is not None:
                found.mul_(factor)
            write().copy_(found)

        with self._one:
            self.moved[way, kind] += source.nbytes
            late = Late(self, way)
            self._queues[way].append((late, copy))
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
        assert found is not None, "memory was let go of while a copy of it was under way"
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
def test_nobody_reads_what_has_not_come_and_nobody_lets_go_of_what_has_not_gone(
    monkeypatch: pytest.MonkeyPatch, layout: str, share: float
) -> None:
    plain = stepped(engine_away(layout.rpartition(",")[0]))
    monkeypatch.setattr(away, "Link", LateLink)
    before = LateLink.made
    late = stepped(engine_away(layout, host=share))
    assert largest_error(whole(late.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
    assert largest_error(whole(late.parallel), whole(plain.parallel)) <= 1e-10
    losses = [engine.evaluate(engine.microbatches(batch_of(SHAPE, 4, seed=7))) for engine in (plain, late)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert LateLink.made > before


def test_activations_that_are_never_read_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "Link", LateLink)
    engine = engine_away("dp=1,offload=activations")
    for seed in range(3):
        total, _ = engine.model(**batch_of(SHAPE, 4, seed=seed))
        if seed:
            torch.autograd.grad(total, [p for p in engine.model.parameters() if p.requires_grad][-1:])
        del total  # the rest of backward never comes
    stepped(engine)
    plain = stepped(engine_away("dp=1"))
    assert largest_error(whole(engine.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
