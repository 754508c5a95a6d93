"""Bytes per parameter on one rank, for what a run may be asked to keep in which type: for tables.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.layout import Layout
from echelon.layout.placement import ParamGroupSpec
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp import zero

TYPES: dict[str, dict[str, int]] = {
    "`dtype=float32`": {"compute_bytes": 4, "master_bytes": 4},
    "`dtype=bfloat16`": {"compute_bytes": 2, "master_bytes": 4},
    "`dtype=float16`": {"compute_bytes": 2, "master_bytes": 4, "float16": True},
    "`dtype=bfloat16`, `reduce=same`": {"compute_bytes": 2, "master_bytes": 4, "reduce_bytes": 2},
    "`dtype=bfloat16`, `master=none`": {"compute_bytes": 2, "master_bytes": 2, "reduce_bytes": 4, "moment_bytes": 4},
    "`dtype=bfloat16`, `master=none`, `reduce=same`, `states=bfloat16`": {
        "compute_bytes": 2,
        "master_bytes": 2,
        "reduce_bytes": 2,
        "moment_bytes": 2,
    },
}


def rows(units: Sequence[ParamGroupSpec]) -> Iterator[tuple[str, ...]]:
    policy, count = zero.sharding_policy(Layout.parse("dp=1,accumulate=2")), sum(unit.numel for unit in units)
    for label, sizes in TYPES.items():
        held = dp_cost.state_bytes(units, policy, moments=2, **sizes)
        each = [size / count for category, size in held.items() if category != "versions"]
        yield label, *(f"{size:g}" for size in (*each, sum(each)))
