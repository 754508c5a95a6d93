"""`OffloadHost`: the link, worker thread, buffers and disk that all offloaded parameter groups of a rank share."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from echelon.layout.placement import ParamGroupSpec
from echelon.memory.offload.cost import offloads_params
from echelon.memory.offload.disk_store import DiskFolder
from echelon.memory.offload.host_transfer import HostBufferQueue, HostLink
from echelon.memory.offload.host_worker import HostWorker
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.parallel.parallel_options import ParallelOptions

GRAD_BUFFERS = 3
"""host buffers for gradients: the update reads one, one is being filled, one is free"""
STAGING_BUFFERS = 2
"""host buffers for parameters that are copied to the device"""


class OffloadHost:
    """What all offloaded groups of a rank share on the host: buffers for the largest group, a worker, a folder."""

    def __init__(self, link: HostLink, groups: Sequence[ParamGroupSpec], options: ParallelOptions, offload: str):
        grad_bytes, param_bytes = (
            max(group.shard_numel * group.element_bytes(dtype.itemsize) for group in groups)
            for dtype in (options.master_dtype, options.compute_dtype)
        )
        self.disk: DiskFolder | None = None
        """the files that hold the states instead of host memory"""
        if "disk" in offload.split("+"):
            self.disk = DiskFolder(Path(options.disk_dir or tempfile.gettempdir()), f"echelon-rank{world_rank()}")
        self.link, self.worker = link, HostWorker("echelon-host")
        self.worker.submit("finding its device", link.set_device)
        self.grad_buffers = HostBufferQueue(link, GRAD_BUFFERS, grad_bytes)
        """for gradients that arrive from the device"""
        self.param_staging = HostBufferQueue(link, STAGING_BUFFERS, param_bytes)
        """for parameters that are copied to the device"""
        self.read_ahead = HostBufferQueue(link, GRAD_BUFFERS, param_bytes)
        """for parameters that are read ahead from disk"""
        self.paged = offloads_params(offload)
        """parameters and gradients live on the host too"""
        self.updates_on_device = options.updates_on_device
        """states are on the device during the update (optim/paged_optimizer.py)"""


def buffer_bytes(max_numel: int, master: torch.dtype, compute: torch.dtype) -> int:
    """Return the bytes of the shared host buffers, without a disk."""
    return max_numel * (GRAD_BUFFERS * master.itemsize + STAGING_BUFFERS * compute.itemsize)
