"""The pool of warm ranks that serves all tests of a worker, and the core that the worker keeps to."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from echelon.launch.rank_pool import RankPool

# pytest names a test file tests.room.test_idea. With the project's root on the path a rank finds it under that name,
# so a test can send functions of its own file to the pool.
sys.path.append(str(Path(__file__).parent.parent))
# Kernels on a machine without a GPU: Triton's interpreter runs them, statement by statement, on the processor. It is
# asked for when triton is imported, and transformers imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Each worker and its ranks keep to one core: a rank wakes the next without an interrupt to another core.

    Eight ranks on one core take as long as eight ranks on two. Several workers share a core, as ranks often wait.
    """
    # A busy machine is no bug: hypothesis would fail a test whose example takes longer than 200 ms, or whose examples
    # take a second to draw.
    settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no clock")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish() -> None:
    """Tests and torch are never garbage: without this every collection of garbage walks all of them."""
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    # Most tests need neither ranks nor torch, and its import takes seconds.
    from echelon.launch.rank_pool import RankPool
    from echelon.verification.verifier import PRELOAD

    class PatientPool(RankPool):
        """Waits longer, since its ranks share their core with those of other workers."""

        def run(self, function: Callable[..., Any], world: int, /, *args: Any, **kwargs: Any) -> list[Any]:
            return super().run(function, world, *args, **{"timeout": 900.0, **kwargs})

    with PatientPool(preload=["pytest", *PRELOAD]) as pool:
        yield pool
