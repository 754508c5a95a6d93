"""`OffloadHost`: the link, worker thread, buffers and disk that all offloaded parameter groups of a rank share."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class OffloadHost:
    """What all offloaded groups of a rank share on the host."""

    link: HostLink
    worker: HostWorker
    grad_buffers: HostBufferQueue
    """for gradients that arrive from the device"""
    param_staging: HostBufferQueue
    """for parameters that are copied to the device"""
    read_ahead: HostBufferQueue
    """for parameters that are read ahead from disk"""
    paged: bool
    """parameters and gradients live on the host too"""
    disk: DiskFolder | None = None
    """the files that hold the states instead of host memory"""

    @classmethod
    def create(
        cls, link: HostLink, groups: Sequence[ParamGroupSpec], options: ParallelOptions, offload: str
    ) -> OffloadHost:
        """Allocate the buffers for the largest group, start the worker and open the folder on disk."""
        disk = None
        if "disk" in offload.split("+"):
            disk = DiskFolder(Path(options.disk_dir or tempfile.gettempdir()), f"echelon-rank{world_rank()}")
        max_grad_bytes, max_param_bytes = (
            max(group.shard_numel * group.element_bytes(dtype.itemsize) for group in groups)
            for dtype in (options.master_dtype, options.compute_dtype)
        )
        worker = HostWorker("echelon-host")
        worker.submit("finding its device", link.set_device)
        return cls(
            link=link,
            worker=worker,
            grad_buffers=HostBufferQueue(link, GRAD_BUFFERS, max_grad_bytes),
            param_staging=HostBufferQueue(link, STAGING_BUFFERS, max_param_bytes),
            read_ahead=HostBufferQueue(link, GRAD_BUFFERS, max_param_bytes),
            paged=offloads_params(offload),
            disk=disk,
        )


def buffer_bytes(max_numel: int, master: torch.dtype, compute: torch.dtype) -> int:
    """Return the bytes of the shared host buffers, without a disk."""
    return max_numel * (GRAD_BUFFERS * master.itemsize + STAGING_BUFFERS * compute.itemsize)
