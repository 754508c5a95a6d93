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
from echelon.layout.placement import Unit
from echelon.memory.offload.activation_offload import Stash
from echelon.memory.offload.cost import chosen, has_states, held, least_share
from echelon.memory.offload.disk_store import Disk
from echelon.memory.offload.host_transfer import Link
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.parallel.dp.offloaded_param_group import Host, buffer_bytes
from echelon.parallel.dp.zero import Policy

if TYPE_CHECKING:
    from echelon.parallel.apply import Options

GIB = 1 << 30
LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""where the system keeps what a group of processes may take, and has, and what it has of files that it can let go of
(the file, and its line there): in its second version, and in its first"""
GROUPS = Path("/sys/fs/cgroup")
WORKING = 0.12
"""share of a GPU's memory for activations and whatever comes and goes, where nobody says how much that is"""


@dataclass(frozen=True, kw_only=True)
class Away:
    """Units off the device, by name; none where the layout offloads no states."""

    names: frozenset[str] = frozenset()
    host: Host | None = None
    stash: Stash | None = None
    """where activations go"""

    def host_of(self, unit: Unit) -> Host | None:
        return self.host if unit.name in self.names else None

    def pages(self, unit: Unit) -> bool:
        """Its parameters and gradients live there too."""
        return self.host is not None and self.host.paged and unit.name in self.names

    def close(self) -> None:
        """Threads end, files are gone."""
        if self.host is not None:
            self.host.worker.stop()
            if self.host.disk is not None:
                self.host.disk.close()


def away_of(
    layout: Layout, options: Options, units: Sequence[Unit], policy: Policy, model: nn.Module, layers: Sequence[str]
) -> Away:
    """Activations of the layers are sent away from here on; units are told where they live by `host_of`."""
    kinds, link = layout.offload.split("+"), Link(options.device)
    stash = None
    if "activations" in kinds:
        stash = Stash(link, last_stays=layout.pp == 1)
        stash.apply(model, layers)
    if not has_states(layout.offload):
        return Away(stash=stash)
    share = options.host if options.host is not None else _share(layout, options, units, policy)
    names = chosen(units, share)
    if not names:
        return Away(stash=stash)
    disk = None
    if "disk" not in kinds:
        refuse_too_much([unit for unit in units if unit.name in names], options, policy, paged="params" in kinds)
    else:
        disk = Disk(Path(options.disk or tempfile.gettempdir()), f"echelon-rank{world_rank()}")
    host = Host.of(
        link,
        [unit for unit in units if unit.name in names],
        master_bytes=options.master.itemsize,
        compute_bytes=options.compute.itemsize,
        paged="params" in kinds,
        disk=disk,
    )
    return Away(names=names, host=host, stash=stash)


def refuse_too_much(units: Sequence[Unit], options: Options, policy: Policy, *, paged: bool) -> None:
    """States that the host cannot hold are refused before they are made; the system would end the process instead."""
    needed = held(
        units,
        paged=paged,
        disk=False,
        compute_bytes=options.compute.itemsize,
        master_bytes=options.master.itemsize,
        state_bytes=options.state_bytes,
        early_bytes={u.name: options.compute.itemsize if policy.gradients_are_final(u) else 0 for u in units},
    )["host"]
    needed += buffer_bytes(max(unit.shard_numel for unit in units), options.master, options.compute)
    free = available()
    if free and needed > free:
        raise ValueError(
            f"the host cannot hold what leaves the device ({needed / GIB:.1f} GiB a rank, {free / GIB:.1f} available); "
            "let less leave (memory.host), divide it over more ranks, or use offload=...+disk"
        )


def available() -> int:
    """Bytes that this process may still take; 0 where the system does not say."""
    found = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used, stat, line in LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            most, taken = (int((GROUPS / name).read_text()) for name in (limit, used))
            cached = dict(text.split() for text in (GROUPS / stat).read_text().splitlines())
            found.append(most - taken + int(cached.get(line, 0)))
    return min(found, default=0)


def _share(layout: Layout, options: Options, units: Sequence[Unit], policy: Policy) -> float:
    """As few as possible; all of them where there is no GPU to run out of memory."""
    if options.device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(options.device)
    compute, master = options.compute.itemsize, options.master.itemsize
    working = options.working or WORKING * total
    stay, leave = 0.0, 0.0
    elements = sum(unit.shard_numel for unit in units)
    paged = "params" in layout.offload.split("+")
    for unit in units:
        parameters = 0 if policy.free_parameters else unit.shards * unit.shard_numel * compute
        final = policy.gradients_are_final(unit)
        held = unit.shard_numel * (1 if policy.scatter_every_microbatch else unit.shards)
        gradients = held * (compute if final else master)
        beside = master - compute if policy.stays else master  # what the parameters leave out
        stay += parameters + gradients + unit.shard_numel * (beside + options.state_bytes)
        if not paged:
            leave += parameters + (0 if final else gradients)
    room = free - working
    return least_share(units, room=room, stay=stay / elements, leave=leave / elements)
