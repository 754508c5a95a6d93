"""The pool of warm ranks that serves all tests of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from echelon.launch.pool import Pool

# pytest names a test file tests.room.test_idea. With the project's root on the path a rank finds it under that name,
# so a test can send functions of its own file to the pool.
sys.path.append(str(Path(__file__).parent.parent))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    # Most tests need neither ranks nor torch, and its import takes seconds.
    from echelon.launch.pool import Pool
    from echelon.proof.verify import PRELOAD

    with Pool(preload=["pytest", *PRELOAD]) as pool:
        yield pool
