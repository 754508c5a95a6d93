"""The planner's link model against collectives that others measured with nccl-tests (bench/published/collectives.csv).

Bus bandwidth is wire bytes over time; a prediction is the wire bytes over the time that step_time.py prices: ring
collectives by `group_bandwidth` and `group_latency`, all-to-all by the bytes on each link. Errors are relative to the
printed figure. Of 134 messages of 256 MB and more, those over TCP left out: median 0.31, p90 0.50.

The constants are what training programs reach, beside their compute; nccl-tests runs alone and reaches more. Large
messages reach, of the bandwidth that vendors state (medians of 1 GiB and more; the constants: 0.63 in a node, 0.62
between nodes):

    in a node, all-gather and reduce-scatter        0.80    ring
    in a node, all-reduce on Hopper and Blackwell   1.03    NVLS: the switch reduces, so ranks send less than in a ring
    in a node, all-to-all                           0.75
    InfiniBand, all-gather and reduce-scatter       0.81    up to 0.98
    InfiniBand, all-reduce of more than two nodes   0.91
    InfiniBand, all-to-all                          0.90    of the bytes that leave the node; on Slingshot 0.36

Latency is predicted too low: messages up to 1 MiB take 1.8 times as long (median) as predicted. The model has no TCP:
Polaris reaches a quarter by TCP of what it does by RDMA on the same adapters, and is predicted 3 to 6 times too fast.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from echelon.layout.collective import WIRE_FACTOR, wire_bytes
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cluster.device_kinds import DEVICE_KINDS
from echelon.planning.cost.expert_traffic import LEAF_NODES, _inter_node_share
from echelon.planning.cost.reached_rates import ReachedRates, reached_rates
from echelon.planning.cost.step_work import GENERATIONS, DeviceRates, ExpertTraffic

TABLE = Path(__file__).parents[2] / "bench" / "published" / "collectives.csv"
LARGE, SMALL = 256e6, 1 << 20


@dataclass(frozen=True)
class Measured:
    """One collective and the bus bandwidth, in GB/s, that nccl-tests printed for it."""

    source: str
    fabric: str
    op: str
    device: str
    gpus: int
    gpus_per_node: int
    link_gb_s: float
    size_bytes: int
    bus_gb_s: float

    @property
    def rates(self) -> ReachedRates:
        kind, link = DEVICE_KINDS[self.device], self.link_gb_s * 1e9
        device = DeviceRates(
            generation=GENERATIONS.index(kind.generation),
            low_precision=0,
            peak_flops=kind.peak("bf16"),
            peak_flops_16bit=kind.peak("bf16"),
            memory_bandwidth=kind.bandwidth,
            intra_node_bandwidth=kind.intra_node.bandwidth,
            inter_node_bandwidth=link or kind.inter_node.bandwidth,
            latency=kind.intra_node.latency,
        )
        return reached_rates(device, FITTED_CONSTANTS)

    @property
    def predicted(self) -> float:
        """Bus bandwidth by the time that step_time.py prices, none of it overlapped."""
        wire, rates = wire_bytes(self.op, self.size_bytes, self.gpus), self.rates
        ranks, nodes = self.gpus_per_node, self.gpus / self.gpus_per_node
        if self.op == "all_to_all":
            outside = wire * _inter_node_share(self.gpus, ranks)
            ep = ExpertTraffic(
                intra_node_bytes=wire - outside,
                inter_node_bytes=outside,
                leaf_bytes=outside * max(0.0, 1 - LEAF_NODES / nodes),
                num_collectives=1,
                num_messages=self.gpus - ranks,
            )
            seconds = rates.all_to_all_time(ep)
        else:
            latency = rates.group_latency(ranks, nodes, reduces_all=self.op == "all_reduce")
            seconds = wire / rates.group_bandwidth(nodes == 1, ranks, nodes) + latency
        return float(wire / seconds / 1e9)

    @property
    def error(self) -> float:
        return abs(self.predicted / self.bus_gb_s - 1)


KINDS = {"gpus": int, "gpus_per_node": int, "link_gb_s": float, "size_bytes": int, "bus_gb_s": float}
with TABLE.open(encoding="utf-8", newline="") as table:
    CELLS = list(csv.DictReader(table))
NAMES = list(Measured.__annotations__)
ROWS = [Measured(*(KINDS.get(name, str)(row[name]) for name in NAMES)) for row in CELLS]
RDMA = [row for row in ROWS if row.fabric != "tcp" and row.size_bytes >= LARGE]
TWO_NODES, TCP = (
    next(row for row in ROWS if (row.source, row.gpus, row.size_bytes) == (source, 16, 1 << 30))
    for source in ("skypilot_together", "gcp_a3high")
)


def test_the_table_covers_collectives_fabrics_and_scales() -> None:
    assert len({row.source for row in ROWS}) >= 20
    assert {row.op for row in ROWS} == set(WIRE_FACTOR)
    assert {"nvlink", "infiniband", "roce", "efa", "tcpxo", "slingshot", "tcp"} <= {row.fabric for row in ROWS}
    assert min(row.gpus for row in ROWS) == 8
    assert max(row.gpus for row in ROWS) >= 1024
    assert all(row["where"] for row in CELLS)
    assert all((row.link_gb_s > 0) == (row.gpus > row.gpus_per_node) for row in ROWS)


def test_large_messages() -> None:
    errors = [row.error for row in RDMA]
    assert np.median(errors) <= 0.36
    assert np.quantile(errors, 0.9) <= 0.57
    for op, bound in {"all_reduce": 0.38, "all_gather": 0.27, "reduce_scatter": 0.28, "all_to_all": 0.36}.items():
        assert np.median([row.error for row in RDMA if row.op == op]) <= bound, op


@pytest.mark.parametrize("fabric", ["nvlink", "infiniband"])
def test_training_reaches_less_than_the_benchmark_alone(fabric: str) -> None:
    assert 0.6 <= np.median([row.predicted / row.bus_gb_s for row in RDMA if row.fabric == fabric]) <= 0.9


def test_of_two_messages_of_one_size_the_slower_is_predicted_slower() -> None:
    """Where one printed at least twice the bandwidth of the other: 99% of 747 pairs."""
    pairs = [(a, b) for a in RDMA for b in RDMA if a.size_bytes == b.size_bytes and a.bus_gb_s >= 2 * b.bus_gb_s]
    assert np.mean([a.predicted > b.predicted for a, b in pairs]) >= 0.95


@pytest.mark.parametrize("op", WIRE_FACTOR)
def test_more_nodes_are_not_faster(op: str) -> None:
    by_nodes = [replace(TWO_NODES, op=op, gpus=8 * nodes).predicted for nodes in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert by_nodes == sorted(by_nodes, reverse=True)


def test_ethernet_is_slower_than_infiniband() -> None:
    """200 Gb/s a node by TCP, 3,200 Gb/s by InfiniBand: 19 times the bandwidth as printed, 16 times as predicted."""
    assert TWO_NODES.bus_gb_s / TCP.bus_gb_s == pytest.approx(TWO_NODES.predicted / TCP.predicted, rel=0.25)


def test_latency_takes_part_of_a_small_message() -> None:
    small = [row for row in ROWS if row.size_bytes <= SMALL and row.fabric != "tcp"]
    assert all(row.predicted <= 0.85 * replace(row, size_bytes=1 << 30).predicted for row in small)
    assert 1 <= np.median([row.predicted / row.bus_gb_s for row in small]) <= 2.2


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 3.2), ("all_to_all", 2.8)])
def test_large_groups_are_within_a_factor_of_what_was_measured(op: str, factor: float) -> None:
    """An all-reduce of 1 MiB on 1,024 GPUs went around a ring before, and an all-to-all took no time for messages."""
    large = [row for row in ROWS if row.op == op and row.gpus >= 128 and row.fabric != "tcp"]
    assert len(large) >= 4
    ratios = [row.predicted / row.bus_gb_s for row in large]
    assert all(1 / factor <= one <= factor for one in ratios)
