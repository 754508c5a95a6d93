"""Wire bytes of collectives, latency and bandwidth of a link, and the exposed part of overlapped communication.

The time of each strategy's collectives, latency plus wire bytes over the bandwidth that they reach, is computed in
cost/step_time.py and cost/cp_time.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from echelon.layout.collective import WIRE_FACTOR, Collective, wire_bytes
from echelon.planning.cluster.cluster import Cluster, MeasuredCurves
from echelon.planning.cluster.device_kinds import LinkSpec

COLLECTIVES = (*WIRE_FACTOR, "send")
"""measured curves"""
OVERLAP_SOFTNESS = 0.1
"""exposed share of communication that is exactly as long as the compute that hides it"""


def collective_bytes(item: Collective, ranks: int) -> float:
    """Bytes that a rank sends in all calls of a collective."""
    return item.count * wire_bytes(item.op, item.bytes, ranks)


@lru_cache(maxsize=32)
def fit_link(curves: MeasuredCurves, ranks: int) -> LinkSpec | None:
    """Fit a link to all measured collectives over `ranks` devices; none if there are too few.

    Least squares of the relative error of `latency + wire bytes / bandwidth`: small transfers determine the latency,
    large ones the bandwidth.
    """
    rows = [
        (wire_bytes(kind, size, ranks), seconds)
        for kind in COLLECTIVES
        for size, seconds in getattr(curves, kind)
        if seconds > 0 and (ranks > 1 or kind == "send")
    ]
    wire, seconds = np.array(rows).reshape(-1, 2).T
    if len(set(wire.tolist())) < 2:
        return None
    (latency, pace), *_ = np.linalg.lstsq(np.stack([1 / seconds, wire / seconds], axis=1), np.ones(len(wire)))
    if latency < 0:
        latency, pace = 0.0, np.linalg.lstsq((wire / seconds)[:, None], np.ones(len(wire)))[0][0]
    return LinkSpec(bandwidth=float(1 / pace), latency=float(latency)) if pace > 0 else None


def intra_node_latency(cluster: Cluster) -> float:
    """Latency between devices of a node, as measured or specified."""
    link = fit_link(cluster.curves, cluster.per_node) if cluster.curves else None
    return (link or cluster.intra_node).latency


def exposed_time(communication: Any, compute: Any) -> Any:
    """Communication time beyond the compute that overlaps it, smoothed: they do not progress evenly."""
    more, corner = communication - compute, OVERLAP_SOFTNESS * communication
    return 0.5 * (more + np.sqrt(more * more + corner * corner))
