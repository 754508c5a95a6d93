"""The recorder is complete: every collective of a step is recorded once, and has ended."""

from __future__ import annotations

from collections import Counter

import pytest
from counting import CountCollectives
from tiny_engines import batch_of, engine_of, tiny

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout

Found = tuple[dict[str, int], dict[str, int], set[str], list[str]]


def one_step(layout: str) -> Found:
    shape = tiny()
    engine = engine_of(shape, layout)
    engine.step(batch_of(shape, 8)).wait()
    before = max((entry.order for entry in engine.recorder.entries()), default=-1)
    counted = CountCollectives()
    with counted:
        engine.step(batch_of(shape, 8)).wait()
    seen: Counter[str] = Counter()
    for (kind, _, _), number in counted.seen.items():
        seen[kind] += number
    mine = [entry for entry in engine.recorder.entries() if entry.order > before and entry.op != "receive"]
    noted = Counter("send" if entry.op == "shift" else entry.op for entry in mine)
    return dict(seen), dict(noted), {entry.flag for entry in mine}, sorted({entry.site for entry in mine})


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,accumulate=2", "cp=2"])
def test_every_collective_is_recorded(pool: RankPool, layout: str) -> None:
    for seen, noted, flags, sites in pool.run(one_step, Layout.parse(layout).world, layout):
        assert noted == seen
        assert sum(noted.values()) > 0
        assert flags == {"e"}
        # The call site is the caller, not the file that all collectives go through.
        assert not any("mesh_axis.py" in site or "p2p.py" in site or "faults" in site for site in sites)
