"""Constants of a scenario: fitted, ours, or measured on a machine.

[Note: what replaces what]

    curves.matmul       the share of the peak that GEMMs reach, and their edge; least squares of
                            1 / rate = (1 + edge (1/m + 1/k + 1/n)) / (peak x share)
    curves.attention    best_attention; a row's FLOPs are causal, backward counted as 2.5 forwards
    curves.memory       memory_bandwidth
    collectives         intra_node, the share of the link's bandwidth; count_work.py reads their latency (link_time.py)

What was not measured stays as it is. A calibration of calibrated constants changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from echelon.planning.calibrate.constants import FITTED_CONSTANTS, NATIVE_OVERRIDES, OPERATOR_OVERRIDES, Constants
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.cluster.link_time import fit_link
from echelon.planning.cost.count_work import WIDE_HEAD_DIM
from echelon.planning.cost.step_time import NARROW_HEAD_SPEED
from echelon.planning.scenario import Scenario

CPU_CONSTANTS = {"edge": 8.0, "context_gib": 0.4}
"""of a CPU: elements of a vector register; GiB of a process with torch"""

GEMM_SHARES = {"amd": "accelerator", "npu": "accelerator"}
"""the constant of a generation's GEMMs, if it has another name"""


def constants_for(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> Constants:
    """Constants of a scenario: of our kernels or of other programs, calibrated where the cluster was measured."""
    if scenario.has_kernels or scenario.runs_operators:
        c = _own_constants(c, scenario.has_kernels)
    return calibrate(scenario.cluster, c)


@lru_cache(maxsize=32)
def _own_constants(c: Constants, has_kernels: bool) -> Constants:
    overrides: dict[str, Any] = dict(NATIVE_OVERRIDES if has_kernels else OPERATOR_OVERRIDES)
    return replace(c, **overrides)


def calibrate(cluster: Cluster, c: Constants = FITTED_CONSTANTS) -> Constants:
    """The constants of this cluster's devices; see [Note: what replaces what]."""
    if cluster.curves is None and cluster.device.generation != "cpu":
        return c
    return _calibrate(cluster, c)


@lru_cache(maxsize=32)
def _calibrate(cluster: Cluster, c: Constants) -> Constants:
    device, curves = cluster.device, cluster.curves
    measured: dict[str, Any] = {}
    if device.generation == "cpu":  # it has no device to wait for between steps
        measured = {**CPU_CONSTANTS, "step_overhead": 0.0}
    if curves is None:
        return replace(c, **measured)
    peak = device.peak("bf16") * device.power_share
    if curves.matmul:
        rate, edge = fit_matmul_rate(curves.matmul, measured.get("edge", c.edge))
        measured |= {GEMM_SHARES.get(device.generation, device.generation): rate / peak, "edge": edge}
    if curves.attention:
        rate = fit_attention_rate(curves.attention)
        measured |= {"best_attention": rate / peak, "blackwell_attention": rate / peak}
    if curves.memory:
        measured["memory_bandwidth"] = curves.memory / device.bandwidth
    if link := fit_link(curves, cluster.per_node):
        measured["intra_node"] = link.bandwidth / cluster.intra_node.bandwidth
    return replace(c, **measured)


def fit_matmul_rate(rows: Sequence[tuple[int, int, int, float]], usual_edge: float) -> tuple[float, float]:
    """Fit (FLOPs per second of an infinitely large GEMM, elements added to each dimension).

    Least squares of the relative error. GEMMs of similar sizes do not determine the edge, which is then the default.
    """
    m, k, n, rate = np.array(rows, dtype=np.float64).T
    edges = 1 / m + 1 / k + 1 / n
    if np.ptp(edges) > 1e-3 * edges.max():
        (pace, slope), *_ = np.linalg.lstsq(np.stack([rate, rate * edges], axis=1), np.ones(len(rate)))
        if pace > 0 and slope >= 0:
            return float(1 / pace), float(slope / pace)
        usual_edge = 0.0 if slope < 0 else usual_edge
    longer = rate * (1 + usual_edge * edges)
    return float((longer @ longer) / longer.sum()), usual_edge


def fit_attention_rate(rows: Sequence[tuple[int, int, float]]) -> float:
    """FLOPs per second over all rows, had each as many to do, with heads of 128 elements or more."""
    paces = [(1.0 if head_dim >= WIDE_HEAD_DIM else NARROW_HEAD_SPEED) / rate for _, head_dim, rate in rows]
    return len(paces) / sum(paces)
