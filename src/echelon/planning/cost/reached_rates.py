"""What programs reach of a device's peak rates, by the fitted constants of its generation and the program's profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.planning.calibrate.constants import Constants
from echelon.planning.calibrate.programs import ProgramProfile
from echelon.planning.cost.step_work import AMD, AMPERE, CPU, HOPPER, NPU, TPU, VOLTA, DeviceRates, Number


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
    over two ranks, 0.25 to 4 MiB, takes a core for 70 to 90 % of its time"""
    hop_intra: float
    hop_inter: float
    congestion: float

    def group_bandwidth(self, in_node: Number, ranks_per_node: Number, nodes: Number = 1) -> Number:
        """Bandwidth of a collective: between nodes it uses the links of all its ranks in a node."""
        crowded = 1 + self.congestion * np.log2(np.maximum(nodes, 1))
        across = np.minimum(self.intra_node_bandwidth, self.inter_node_bandwidth * ranks_per_node / crowded)
        return np.where(in_node > 0, self.intra_node_bandwidth, across)

    def group_latency(self, ranks_per_node: Number, nodes: Number) -> Number:
        """Seconds of a ring before its bandwidth counts: its launch, and a hop to every rank, N - 1 of them between the
        N nodes, as NCCL's own tuning has it."""
        nodes = np.maximum(nodes, 1)
        return self.latency + self.hop_intra * (ranks_per_node - 1) * nodes + self.hop_inter * (nodes - 1)


def reached_rates(device: DeviceRates, c: Constants, profile: ProgramProfile | None = None) -> ReachedRates:
    """Scale a device's peaks by the shares that were fitted."""
    generation, speed = device.generation, 1.0 if profile is None else profile.speed
    shares = {
        CPU: c.cpu,
        VOLTA: c.volta,
        AMPERE: c.ampere,
        HOPPER: c.hopper,
        AMD: c.accelerator,
        TPU: c.tpu,
        NPU: c.accelerator,
    }
    share = np.select([generation == known for known in shares], list(shares.values()), c.blackwell) * speed
    fp8_share = np.where(generation == HOPPER, c.hopper_fp8, c.blackwell_fp8)
    low_share = np.where(device.low_precision == 1, fp8_share, c.fp4) * speed
    return ReachedRates(
        gemm_flops=np.where(device.low_precision > 0, device.peak_flops * low_share, device.peak_flops * share),
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
