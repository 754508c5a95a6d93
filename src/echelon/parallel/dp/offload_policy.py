"""Which units' states live off the device, and what they share there: the `offload` of a layout on this rank."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.layout import Layout
from echelon.layout.placement import ParamGroupSpec
from echelon.memory.offload.activation_offload import ActivationOffloader
from echelon.memory.offload.cost import (
    choose_offloaded_units,
    min_offloaded_share,
    off_device_bytes,
    offloads_optimizer,
)
from echelon.memory.offload.disk_store import DiskFolder
from echelon.memory.offload.host_transfer import HostLink
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.parallel.dp.offload_host import OffloadHost, buffer_bytes
from echelon.parallel.dp.zero import ShardingPolicy

if TYPE_CHECKING:
    from echelon.parallel.parallel_options import ParallelOptions

GIB = 1 << 30
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""where the system keeps what a group of processes may take, and has, and what it has of files that it can let go of
(the file, and its line there): in its second version, and in its first"""
CGROUP_ROOT = Path("/sys/fs/cgroup")
WORKING_SHARE = 0.12
"""share of a GPU's memory for activations and whatever comes and goes, where nobody says how much that is"""


@dataclass(frozen=True, kw_only=True)
class StateOffload:
    """Units off the device, by name; none where the layout offloads no states."""

    group_names: frozenset[str] = frozenset()
    host: OffloadHost | None = None
    activation_offload: ActivationOffloader | None = None
    """where activations go"""

    def host_for(self, unit: ParamGroupSpec) -> OffloadHost | None:
        return self.host if unit.name in self.group_names else None

    def is_paged(self, unit: ParamGroupSpec) -> bool:
        """Its parameters and gradients live there too."""
        return self.host is not None and self.host.paged and unit.name in self.group_names

    def close(self) -> None:
        """Threads end, files are gone."""
        if self.host is not None:
            self.host.worker.stop()
            if self.host.disk is not None:
                self.host.disk.close()


def make_offload(
    layout: Layout,
    options: ParallelOptions,
    groups: Sequence[ParamGroupSpec],
    policy: ShardingPolicy,
    model: nn.Module,
    layers: Sequence[str],
) -> StateOffload:
    """Activations of the layers are sent away from here on; units are told where they live by `host_of`."""
    kinds, link = layout.offload.split("+"), HostLink(options.device)
    stash = None
    if "activations" in kinds:
        stash = ActivationOffloader(link, keep_last=layout.pp == 1)
        stash.apply(model, layers)
    if not offloads_optimizer(layout.offload):
        return StateOffload(activation_offload=stash)
    share = options.host_share if options.host_share is not None else _min_host_share(layout, options, groups, policy)
    names = choose_offloaded_units(groups, share)
    if not names:
        return StateOffload(activation_offload=stash)
    disk = None
    if "disk" not in kinds:
        check_host_memory([unit for unit in groups if unit.name in names], options, policy, paged="params" in kinds)
    else:
        disk = DiskFolder(Path(options.disk_dir or tempfile.gettempdir()), f"echelon-rank{world_rank()}")
    host = OffloadHost.create(
        link,
        [unit for unit in groups if unit.name in names],
        master_bytes=options.master_dtype.itemsize,
        compute_bytes=options.compute_dtype.itemsize,
        paged="params" in kinds,
        disk=disk,
    )
    return StateOffload(group_names=names, host=host, activation_offload=stash)


def check_host_memory(
    groups: Sequence[ParamGroupSpec], options: ParallelOptions, policy: ShardingPolicy, *, paged: bool
) -> None:
    """States that the host cannot hold are refused before they are made; the system would end the process instead."""
    needed = off_device_bytes(
        groups,
        with_params=paged,
        disk=False,
        compute_bytes=options.compute_dtype.itemsize,
        master_bytes=options.master_dtype.itemsize,
        state_bytes=options.optimizer_bytes_per_element,
        host_gradient_bytes={
            u.name: options.compute_dtype.itemsize if policy.grads_are_final(u) else 0 for u in groups
        },
    )["host"]
    needed += buffer_bytes(max(unit.shard_numel for unit in groups), options.master_dtype, options.compute_dtype)
    free = available_host_bytes()
    if free and needed > free:
        raise ValueError(
            f"the host cannot hold what leaves the device ({needed / GIB:.1f} GiB a rank, {free / GIB:.1f} available); "
            "let less leave (memory.host), divide it over more ranks, or use offload=...+disk"
        )


def available_host_bytes() -> int:
    """Bytes that this process may still take; 0 where the system does not say."""
    found = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used, stat, line in CGROUP_FILES:
        with suppress(OSError, ValueError):  # "max" is no number
            most, taken = (int((CGROUP_ROOT / name).read_text()) for name in (limit, used))
            cached = dict(text.split() for text in (CGROUP_ROOT / stat).read_text().splitlines())
            found.append(most - taken + int(cached.get(line, 0)))
    return min(found, default=0)


def _min_host_share(
    layout: Layout, options: ParallelOptions, units: Sequence[ParamGroupSpec], policy: ShardingPolicy
) -> float:
    """As few as possible; all of them where there is no GPU to run out of memory."""
    if options.device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(options.device)
    compute, master = options.compute_dtype.itemsize, options.master_dtype.itemsize
    working = options.working_bytes or WORKING_SHARE * total
    stay, leave = 0.0, 0.0
    elements = sum(unit.shard_numel for unit in units)
    paged = "params" in layout.offload.split("+")
    for unit in units:
        parameters = 0 if policy.reshards_params else unit.num_shards * unit.shard_numel * compute
        final = policy.grads_are_final(unit)
        held = unit.shard_numel * (1 if policy.reduce_scatter_every_microbatch else unit.num_shards)
        gradients = held * (compute if final else master)
        beside = master - compute if policy.keeps_param_shard else master  # what the parameters leave out
        stay += parameters + gradients + unit.shard_numel * (beside + options.optimizer_bytes_per_element)
        if not paged:
            leave += parameters + (0 if final else gradients)
    room = free - working
    return min_offloaded_share(
        units, state_budget=room, bytes_if_resident=stay / elements, bytes_if_offloaded=leave / elements
    )
