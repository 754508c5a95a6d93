"""`StateOffload`: which parameter groups' states live off the device, by the layout's `offload`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from echelon.layout.placement import ParamGroupSpec
from echelon.memory.offload.activation_offload import ActivationOffloader
from echelon.memory.offload.cost import (
    choose_offloaded_units,
    min_offloaded_share,
    off_device_bytes,
    offloads_optimizer,
    offloads_params,
)
from echelon.memory.offload.host_transfer import HostLink
from echelon.models.layer_lists import layer_names
from echelon.parallel.dp.offload_host import OffloadHost, buffer_bytes
from echelon.parallel.dp.zero import ShardingPolicy
from echelon.parallel.parallel_options import ParallelOptions

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext

GIB = 1 << 30
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""cgroup files of the memory limit, usage and statistics, and the line of reclaimable page cache there: v2, v1"""
CGROUP_ROOT = Path("/sys/fs/cgroup")
WORKING_SHARE = 0.12
"""share of a GPU's memory for activations and temporary buffers, if `working_bytes` is not given"""


@dataclass(frozen=True, kw_only=True)
class StateOffload:
    """Offloaded parameter groups by name; none if the layout offloads no states."""

    group_names: frozenset[str] = frozenset()
    host: OffloadHost | None = None
    activation_offload: ActivationOffloader | None = None
    """the offload of activations"""

    def host_for(self, group: ParamGroupSpec) -> OffloadHost | None:
        return self.host if group.name in self.group_names else None

    def is_paged(self, group: ParamGroupSpec) -> bool:
        """Return whether a group's parameters and gradients live off the device too."""
        return self.host is not None and self.host.paged and group.name in self.group_names

    def close(self) -> None:
        """Stop the worker and remove the files."""
        if self.host is not None:
            self.host.worker.stop()
            self.host.link.synchronize()  # the device's memory may be freed from now on
            if self.host.disk is not None:
                self.host.disk.close()


def make_offload(context: TransformContext) -> StateOffload:
    """Offload the layers' activations from here on, and choose the groups whose states are offloaded."""
    layout, options, groups = context.layout, context.options, context.placement.param_groups
    offloads, link, activations = layout.offload.split("+"), HostLink(options.device), None
    if "activations" in offloads:
        activations = ActivationOffloader(link, keep_last=layout.pp == 1)
        activations.apply(context.model, layer_names(context.model))
    share = 0.0
    if offloads_optimizer(layout.offload):
        share = _min_host_share(context) if options.host_share is None else options.host_share
    # Frozen groups have no states: their parameters alone can leave the device.
    candidates = [group for group in groups if group.trainable or "params" in offloads]
    names = choose_offloaded_units(candidates, share)
    if not names:
        return StateOffload(activation_offload=activations)
    offloaded = [group for group in groups if group.name in names]
    if "disk" not in offloads:
        check_host_memory(offloaded, options, context.policy, paged="params" in offloads)
    host = OffloadHost(link, offloaded, options, layout.offload)
    return StateOffload(group_names=names, host=host, activation_offload=activations)


def check_host_memory(
    groups: Sequence[ParamGroupSpec], options: ParallelOptions, policy: ShardingPolicy, *, paged: bool
) -> None:
    """Raise ValueError if the host cannot hold the states, before the system kills the process for memory."""
    compute, master = options.compute_dtype.itemsize, options.master_dtype.itemsize
    needed = off_device_bytes(
        groups,
        with_params=paged,
        disk=False,
        compute_bytes=compute,
        master_bytes=master,
        state_bytes=options.optimizer_bytes_per_element,
        host_gradient_bytes={group.name: compute if policy.grads_are_final(group) else 0 for group in groups},
    )["host"]
    needed += buffer_bytes(max(group.shard_numel for group in groups), options.master_dtype, options.compute_dtype)
    free = available_host_bytes()
    if free and needed > free:
        raise ValueError(
            f"the host cannot hold the offloaded states ({needed / GIB:.1f} GiB a rank, {free / GIB:.1f} available); "
            "offload less (memory.host), shard over more ranks, or use offload=...+disk"
        )


def available_host_bytes() -> int:
    """Return the bytes that this process may still allocate; 0 if the system does not report them."""
    limits = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used, stat, line in CGROUP_FILES:
        with suppress(OSError, ValueError):  # "max" is no number
            most, taken = (int((CGROUP_ROOT / name).read_text()) for name in (limit, used))
            cached = dict(text.split() for text in (CGROUP_ROOT / stat).read_text().splitlines())
            limits.append(most - taken + int(cached.get(line, 0)))
    return min(limits, default=0)


def _min_host_share(context: TransformContext) -> float:
    """Return the smallest share of the states that makes the rest fit; all of them without a GPU.

    All ranks of a stage offload the same groups: updates on the device have collectives.
    """
    options, policy, groups = context.options, context.policy, context.placement.param_groups
    if options.device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(options.device)
    compute, master = options.compute_dtype.itemsize, options.master_dtype.itemsize
    working = options.working_bytes or WORKING_SHARE * total
    resident, offloaded = 0.0, 0.0
    for group in groups:
        parameters = 0 if policy.reshards_params else group.num_shards * group.shard_numel * compute
        if not group.trainable:
            resident += parameters or group.shard_numel * compute
            offloaded += 0 if offloads_params(context.layout.offload) else parameters or group.shard_numel * compute
            continue
        final = policy.grads_are_final(group)
        grad_numel = group.shard_numel * (1 if policy.reduce_scatter_every_microbatch else group.num_shards)
        gradients = grad_numel * (compute if final else master)
        low_bits = master - compute if policy.keeps_param_shard else master  # the bits that the parameters do not hold
        resident += parameters + gradients + group.shard_numel * (low_bits + options.optimizer_bytes_per_element)
        if not offloads_params(context.layout.offload):
            offloaded += parameters + (0 if final else gradients)
    numel, budget = sum(group.shard_numel for group in groups), free - working
    share = min_offloaded_share(
        groups, state_budget=budget, bytes_if_resident=resident / numel, bytes_if_offloaded=offloaded / numel
    )
    agreed = torch.tensor(share, dtype=torch.float64, device=options.device)
    return float(context.axes.get_or_add("replica*shard*cp*tp").all_reduce(agreed, op="max"))
