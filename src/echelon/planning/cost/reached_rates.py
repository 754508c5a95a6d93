"""What programs reach of a device's peak rates, by the fitted constants of its generation and the program's profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.planning.calibrate.constants import Constants
from echelon.planning.calibrate.programs import ProgramProfile
from echelon.planning.cost.step_work import (
    AMD,
    AMPERE,
    BLACKWELL,
    CPU,
    HOPPER,
    NPU,
    TPU,
    VOLTA,
    DeviceRates,
    ExpertTraffic,
    Number,
)

BISECTION_SHARE = 0.57
"""of the links that traffic between all pairs of nodes reaches under static routes, once it leaves a leaf switch: the
effective bisection bandwidth that Hoefler, Schneider and Lumsdaine (2008) found on InfiniBand, 0.4 to 0.7"""
MESSAGE_SECONDS = 6e-6
"""of an all-to-all for each rank of another node: 4 microseconds on 80 H100, 10 on 1,024 A100 (collectives.csv)"""


@dataclass(frozen=True, kw_only=True)
class ReachedRates:
    """Per second: FLOPs of large GEMMs, bytes of memory and links."""

    gemm_flops: Number
    """in the dtype of the GEMMs"""
    gemm_flops_16bit: Number
    gemm_edge: Number
    """elements that partly filled tiles add to each dimension of a GEMM"""
    memory_bandwidth: Number
    intra_node_bandwidth: Number
    inter_node_bandwidth: Number
    latency: Number
    """seconds of one collective"""
    hides_communication: Number
    """1 where communication runs beside compute. On a CPU (0) the cores that compute also send: an all-reduce of gloo
    over two ranks, 0.25 to 4 MiB, takes a core for 67 to 89 % of its time"""
    hop_intra: float
    hop_inter: float
    congestion: float

    def group_bandwidth(self, in_node: Number, ranks_per_node: Number, nodes: Number = 1) -> Number:
        """Bandwidth of a collective: between nodes it uses the links of all its ranks in a node."""
        crowded = 1 + self.congestion * np.log2(np.maximum(nodes, 1))
        across = np.minimum(self.intra_node_bandwidth, self.inter_node_bandwidth * ranks_per_node / crowded)
        return np.where(in_node > 0, self.intra_node_bandwidth, across)

    def group_latency(self, ranks_per_node: Number, nodes: Number, *, reduces_all: bool = False) -> Number:
        """Seconds of a collective before its bandwidth counts: its launch and its hops, as NCCL's own tuning has them.

        A ring hops to every rank, N - 1 times between the N nodes. An all-reduce goes around it twice, or up and down
        a tree of nodes, whichever is quicker.
        """
        nodes = np.maximum(nodes, 1)
        ring = self.hop_intra * (ranks_per_node - 1) * nodes + self.hop_inter * (nodes - 1)
        tree = self.hop_intra * (ranks_per_node - 1) + self.hop_inter * np.log2(nodes)
        hops: Number = 2 * np.minimum(ring, tree) if reduces_all else ring
        return self.latency + hops

    def all_to_all_time(self, traffic: ExpertTraffic) -> Number:
        """Seconds of all-to-alls: the slower of both links, a message to every rank of another node, and what routing
        costs beyond a leaf switch."""
        inside = traffic.intra_node_bytes / self.intra_node_bandwidth
        crowded = traffic.inter_node_bytes + (1 / BISECTION_SHARE - 1) * traffic.leaf_bytes
        outside = crowded / self.inter_node_bandwidth + MESSAGE_SECONDS * traffic.num_messages
        return np.maximum(inside, outside) + self.latency * traffic.num_collectives


def reached_rates(device: DeviceRates, c: Constants, profile: ProgramProfile | None = None) -> ReachedRates:
    """Scale a device's peaks by the shares that were fitted."""
    generation, speed = device.generation, 1.0 if profile is None else profile.speed
    by_generation = {
        CPU: c.cpu,
        VOLTA: c.volta,
        AMPERE: c.ampere,
        HOPPER: c.hopper,
        AMD: c.accelerator,
        TPU: c.tpu,
        NPU: c.accelerator,
    }
    known = [generation == one for one in by_generation]
    share = np.select(known, list(by_generation.values()), c.blackwell) * speed
    # Below 16 bits, devices of which no run in them was measured lose what those of NVIDIA do.
    fp8_share = np.where(generation == BLACKWELL, c.blackwell_fp8 * speed, share * c.hopper_fp8 / c.hopper)
    fp4_share = np.where(generation == BLACKWELL, c.fp4 * speed, share * c.fp4 / c.blackwell)
    low_share = np.where(device.low_precision == 1, fp8_share, fp4_share)
    return ReachedRates(
        gemm_flops=device.peak_flops * np.where(device.low_precision > 0, low_share, share),
        gemm_flops_16bit=device.peak_flops_16bit * share,
        gemm_edge=c.edge * device.peak_flops / device.peak_flops_16bit,
        memory_bandwidth=device.memory_bandwidth * c.memory_bandwidth,
        intra_node_bandwidth=device.intra_node_bandwidth * c.intra_node,
        inter_node_bandwidth=device.inter_node_bandwidth * c.inter_node,
        latency=device.latency,
        hides_communication=np.where(generation == CPU, 0.0, 1.0),
        hop_intra=c.hop_intra,
        hop_inter=c.hop_inter,
        congestion=c.congestion,
    )
