"""What programs reach of a device's peak rates, by the fitted constants of its generation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.planning.calibrate.constants import Constants
from echelon.planning.cost.step_work import AMPERE, CPU, HOPPER, VOLTA, DeviceRates, Number


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

    def group_bandwidth(self, in_node: Number, ranks_per_node: Number) -> Number:
        """Bandwidth of a collective: between nodes it uses the links of all its ranks in a node."""
        across = np.minimum(self.intra_node_bandwidth, self.inter_node_bandwidth * ranks_per_node)
        return np.where(in_node > 0, self.intra_node_bandwidth, across)


def reached_rates(device: DeviceRates, c: Constants) -> ReachedRates:
    """Scale a device's peaks by the shares that were fitted."""
    generation = device.generation
    shares = {CPU: c.cpu, VOLTA: c.volta, AMPERE: c.ampere, HOPPER: c.hopper}
    share = np.select([generation == known for known in shares], list(shares.values()), c.blackwell)
    fp8_share = np.where(generation == HOPPER, c.hopper_fp8, c.blackwell_fp8)
    low_share = np.where(device.low_precision == 1, fp8_share, c.fp4)
    link_share = np.where(generation < HOPPER, c.pre_hopper_links, 1.0)
    return ReachedRates(
        gemm_flops=np.where(device.low_precision > 0, device.peak_flops * low_share, device.peak_flops * share),
        gemm_flops_16bit=device.peak_flops_16bit * share,
        gemm_edge=c.edge * device.peak_flops / device.peak_flops_16bit,
        memory_bandwidth=device.memory_bandwidth * c.memory_bandwidth,
        intra_node_bandwidth=device.intra_node_bandwidth * c.intra_node * link_share,
        inter_node_bandwidth=device.inter_node_bandwidth * c.inter_node * link_share,
        latency=device.latency,
    )
