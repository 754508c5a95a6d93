"""`Cluster`: devices, nodes and links, from a name, a file, or this machine.

8xh100              one node of eight
12xh100             a node of eight and four more
64xa100-80:eth      eight nodes joined by Ethernet (`:ib` is InfiniBand as it comes with the kind, and the default)
8xh100+8xa100-80    two kinds; a plan is priced on the slower one
mine.toml           a file; cluster_file.py shows one
here                this machine
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.planning.cluster.device_kinds import DEVICE_KINDS, GIB, DeviceKind, LinkSpec

NETWORKS = {"ib": 0.0, "eth": 100e9 / 8, "roce": 400e9 / 8}
"""bytes per second of a host; ib: as specified by the device kind"""
ETHERNET_LATENCY = 3e-5
HOST_DEVICES = 8
"""most devices that share a host and its NIC: an NVLink domain may have several hosts"""
HOST_MEMORY = 128 * GIB
"""default, per device"""
DISK_BANDWIDTH = 1e9
"""default bytes per second to and from disk, per device"""
MAX_DEVICES = 1_000_000
"""more are a typing error"""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one device kind and size."""

    device: DeviceKind
    nodes: int
    per_node: int
    """devices of a node, or of an NVLink domain"""

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class MeasuredCurves:
    """Measurements of the devices of one node. Empty or 0: not measured."""

    matmul: tuple[tuple[int, int, int, float], ...] = ()
    """(m, k, n, FLOPs per second) of m x k times k x n in bf16, with the two GEMMs of its backward"""
    attention: tuple[tuple[int, int, float], ...] = ()
    """(length of the sequence, head_dim, FLOPs per second) of causal attention, backward counted as 2.5 forwards"""
    memory: float = 0.0
    """bytes per second of a streaming operator, reads and writes"""
    host: float = 0.0
    """bytes per second between a device and its host, all devices of the node at once"""
    all_reduce: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds), over the devices of a node"""
    all_gather: tuple[tuple[int, float], ...] = ()
    """(bytes of the gathered output, seconds)"""
    reduce_scatter: tuple[tuple[int, float], ...] = ()
    """(bytes of the full input, seconds)"""
    all_to_all: tuple[tuple[int, float], ...] = ()
    """(bytes that a device holds, seconds)"""
    send: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds), from one device to another"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and their links."""

    name: str
    node_groups: tuple[NodeGroup, ...]
    """several where device kinds or node sizes differ"""
    intra_node: LinkSpec
    """between devices of a node, the slowest"""
    inter_node: LinkSpec
    """between nodes, the slowest; bytes per second and device"""
    host_memory: int
    """bytes of a node's host, the smallest"""
    disk_bandwidth: float
    """bytes per second of a node"""
    curves: MeasuredCurves | None = None

    @property
    def devices(self) -> int:
        return sum(part.devices for part in self.node_groups)

    @property
    def nodes(self) -> int:
        return sum(part.nodes for part in self.node_groups)

    @cached_property
    def per_node(self) -> int:
        """Devices per node, in the node group with most devices."""
        return max(self.node_groups, key=lambda part: (part.devices, part.per_node)).per_node

    @cached_property
    def device(self) -> DeviceKind:
        """The slowest device kind, which the others wait for."""
        devices = (group.device for group in self.node_groups)
        return min(devices, key=lambda device: (device.peak("bf16"), device.bandwidth))

    @cached_property
    def memory(self) -> int:
        """Bytes of the smallest device."""
        return min(part.device.memory for part in self.node_groups)

    def with_devices(self, change: Callable[[DeviceKind], DeviceKind]) -> Cluster:
        groups = (replace(group, device=change(group.device)) for group in self.node_groups)
        return replace(self, node_groups=tuple(groups))

    @property
    def price(self) -> float:
        """US dollars an hour, all devices together."""
        return sum(part.devices * part.device.price for part in self.node_groups)

    @property
    def watts(self) -> float:
        """At full load, all devices together."""
        return sum(part.devices * part.device.watts for part in self.node_groups)


def build_cluster(name: str, parts: Sequence[NodeGroup], links: Sequence[LinkSpec] = ()) -> Cluster:
    """A cluster of node groups with the usual links of their devices, or the slowest of `links` between nodes."""
    outside = links or [part.device.inter_node for part in parts]
    smallest = min(parts, key=lambda part: part.per_node)
    # The memory of a CPU is that of its host.
    each = DEVICE_KINDS["cpu"].memory if smallest.device.generation == "cpu" else HOST_MEMORY
    return Cluster(
        name=name,
        node_groups=tuple(parts),
        intra_node=min((part.device.intra_node for part in parts), key=_speed),
        inter_node=min(outside, key=_speed),
        host_memory=each * smallest.per_node,
        disk_bandwidth=DISK_BANDWIDTH * smallest.per_node,
    )


def _speed(link: LinkSpec) -> tuple[float, float]:
    return link.bandwidth, -link.latency


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster. Raises ValidationError with all issues."""
    from echelon.planning.cluster.cluster_file import read_cluster_file  # imports this module

    text = text.strip()
    if text == "here":
        return local_cluster()
    if text.endswith(".toml") or os.path.isfile(text):
        return read_cluster_file(text)
    pieces = [_parse_group(piece.strip()) for piece in text.split("+")]
    groups = [piece for piece in pieces if not isinstance(piece, ValidationIssue)]
    if len(groups) < len(pieces):
        raise ValidationError(piece for piece in pieces if isinstance(piece, ValidationIssue))
    return build_cluster(text, [part for parts, _ in groups for part in parts], [link for _, link in groups])


_GROUP = re.compile(r"(?P<count>-?\d{1,12})\s*[x*]\s*(?P<kind>[a-z0-9._-]+)(:(?P<network>\w*))?", re.IGNORECASE)
_LEGAL = "COUNTxKIND[:ib|:eth|:roce] such as 8xh100, several joined by +, a TOML file, or here"


def _parse_group(text: str) -> tuple[list[NodeGroup], LinkSpec] | ValidationIssue:
    """The nodes of one device kind and the links between them, or an issue."""

    def issue(message: str, legal: str, hint: str = "") -> ValidationIssue:
        return ValidationIssue(key="cluster", value=text, message=message, legal=legal, hint=hint)

    match = _GROUP.fullmatch(text)
    if match is None:
        meant = next((kind for kind in DEVICE_KINDS if text.lower().endswith(kind)), "")
        hint = f'did you mean "{re.match(r"[0-9]*", text)[0] or 1}x{meant}"?' if meant else ""  # type: ignore[index]
        return issue("cannot be read", _LEGAL, hint)
    count, kind, network = int(match["count"]), match["kind"].lower(), (match["network"] or "ib").lower()
    if not 1 <= count <= MAX_DEVICES:
        return issue("has no number of devices", f"1 to {MAX_DEVICES}")
    known: tuple[tuple[str, str, Iterable[str]], ...]
    known = (("a kind of device", kind, DEVICE_KINDS), ("a network", network, NETWORKS))
    for what, word, words in known:
        if word not in words:
            hint = did_you_mean(word, words) or ("describe others in a TOML file" if words is DEVICE_KINDS else "")
            return issue(f"does not name {what} ({word})", ", ".join(words), hint)
    parts = list(split_into_nodes(DEVICE_KINDS[kind], count))
    return parts, _network_link(network, parts)


def split_into_nodes(device: DeviceKind, count: int) -> Iterator[NodeGroup]:
    """Full nodes, and one with the remaining devices."""
    full, rest = divmod(count, device.nvlink_domain)
    if full:
        yield NodeGroup(device=device, nodes=full, per_node=device.nvlink_domain)
    if rest:
        yield NodeGroup(device=device, nodes=1, per_node=rest)


def _network_link(name: str, parts: Sequence[NodeGroup]) -> LinkSpec:
    """The share of a device when all devices of a host send at once."""
    if not NETWORKS[name]:
        return parts[0].device.inter_node
    sharing = min(max(part.per_node for part in parts), HOST_DEVICES)
    return LinkSpec(bandwidth=NETWORKS[name] / sharing, latency=ETHERNET_LATENCY)


def local_cluster(device: str = "auto") -> Cluster:
    """The GPUs of this machine as one node, or its CPU cores if it has none or `device` is cpu."""
    import torch  # slow, and needed only here

    if device == "cpu" or not torch.cuda.is_available():
        cores = cpu_cores()
        memory = _physical_memory()
        cpu = replace(DEVICE_KINDS["cpu"], memory=memory // cores)
        return replace(build_cluster("here", [NodeGroup(device=cpu, nodes=1, per_node=cores)]), host_memory=memory)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    unknown = sorted({gpu.name for gpu in gpus if not device_kind(gpu.name, gpu.total_memory)})
    if unknown:
        rule = f"has unknown devices ({', '.join(unknown)})"
        hint = "describe them in a TOML file (docs/planning.md), for plan --cluster FILE and bench --cluster FILE"
        raise ValidationError.single("cluster", "here", rule, legal=", ".join(DEVICE_KINDS), hint=hint)
    kinds = sorted((device_kind(gpu.name, gpu.total_memory), gpu.total_memory) for gpu in gpus)
    parts = [
        NodeGroup(device=replace(DEVICE_KINDS[kind], memory=memory), nodes=1, per_node=len(list(same)))
        for (kind, memory), same in groupby(kinds)
    ]
    return replace(build_cluster("here", parts), host_memory=_physical_memory())


def cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_kind(name: str, memory: int) -> str:
    """The device kind of a driver's device name, or "".

    >>> device_kind("NVIDIA A100-SXM4-80GB", 80 << 30), device_kind("NVIDIA H200", 140 << 30)
    ('a100-80', 'h200')
    """
    named = [
        kind for kind, known in DEVICE_KINDS.items() if re.search(rf"\b{known.driver_name}\b", name, re.IGNORECASE)
    ]
    return min(named, key=lambda kind: abs(DEVICE_KINDS[kind].memory - memory), default="")


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
