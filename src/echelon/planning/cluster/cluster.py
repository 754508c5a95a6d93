"""`Cluster`: how many devices of which kinds, joined how. From a name, a file, or the machine at hand.

8xh100              one node of eight
12xh100             a node of eight and four more
64xa100-80:eth      eight nodes joined by Ethernet (`:ib` is InfiniBand as it comes with the kind, and the default)
8xh100+8xa100-80    two kinds; a plan is priced on the slower one
mine.toml           cluster_file.py says what is in it
here                this machine
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from echelon.layout.validation_error import Fault, FaultError, did_you_mean
from echelon.planning.cluster.device_kinds import GIB, KINDS, Device, Link

NETWORKS = {"ib": 0.0, "eth": 100e9 / 8, "roce": 400e9 / 8}
"""bytes per second that a host can send; ib: as it comes with the kind of device"""
ETHERNET_LATENCY = 3e-5
HOST_DEVICES = 8
"""devices that share a host and its network card, at most: an NVLink domain may have several hosts"""
HOST_MEMORY = 128 * GIB
"""of a host, per device, where nothing else is said"""
DISK = 1e9
"""bytes per second to and from disk, per device, where nothing else is said"""
MOST = 1_000_000
"""devices; more are a slip of the keyboard"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Nodes of one kind."""

    device: Device
    nodes: int
    per_node: int
    """devices of a node, or of an NVLink domain"""

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What was measured, for devices of one kind in one node. What is empty or 0 was not."""

    matmul: tuple[tuple[int, int, int, float], ...] = ()
    """(m, k, n, FLOPs per second) of m x k times k x n in bf16, best with the two products of its backward"""
    attention: tuple[tuple[int, int, float], ...] = ()
    """(length of the sequence, head_dim, FLOPs per second) of causal attention, backward counted as 2.5 forwards"""
    memory: float = 0.0
    """bytes per second that an operator reads and writes"""
    host: float = 0.0
    """bytes per second between a device and its host, with all devices of the node at it"""
    all_reduce: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds), over the devices of a node"""
    all_gather: tuple[tuple[int, float], ...] = ()
    """(bytes of the whole result, seconds)"""
    reduce_scatter: tuple[tuple[int, float], ...] = ()
    """(bytes of the whole input, seconds)"""
    all_to_all: tuple[tuple[int, float], ...] = ()
    """(bytes that a device holds, seconds)"""
    send: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds), from one device to another"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, and what joins them."""

    name: str
    """as given"""
    parts: tuple[Part, ...]
    """the nodes; several where kinds are mixed or nodes differ in size"""
    inside: Link
    """between devices of a node, the slowest"""
    outside: Link
    """between nodes, the slowest; bytes per second and device"""
    host_memory: int
    """bytes of a node's host, the smallest"""
    disk_bandwidth: float
    """bytes per second of a node"""
    curves: Curves | None = None

    @property
    def devices(self) -> int:
        return sum(part.devices for part in self.parts)

    @property
    def nodes(self) -> int:
        return sum(part.nodes for part in self.parts)

    @cached_property
    def per_node(self) -> int:
        """Devices of a node, of those that most devices are in: a rest that fills no node is left to itself."""
        return max(self.parts, key=lambda part: (part.devices, part.per_node)).per_node

    @cached_property
    def device(self) -> Device:
        """The slowest kind, which everyone waits for."""
        return min((part.device for part in self.parts), key=lambda device: (device.peak("bf16"), device.bandwidth))

    @cached_property
    def memory(self) -> int:
        """Bytes of the smallest device."""
        return min(part.device.memory for part in self.parts)

    @property
    def price(self) -> float:
        """US dollars an hour, all devices together."""
        return sum(part.devices * part.device.price for part in self.parts)

    @property
    def watts(self) -> float:
        """At full load, all devices together."""
        return sum(part.devices * part.device.watts for part in self.parts)


def joined(name: str, parts: Sequence[Part], links: Sequence[Link] = ()) -> Cluster:
    """The cluster of these nodes, joined as their devices usually are, or by the slowest of `links` if given."""
    outside = links or [part.device.outside for part in parts]
    smallest = min(parts, key=lambda part: part.per_node)
    # The memory of a processor is that of its host.
    each = KINDS["cpu"].memory if smallest.device.generation == "cpu" else HOST_MEMORY
    return Cluster(
        name=name,
        parts=tuple(parts),
        inside=min((part.device.inside for part in parts), key=_speed),
        outside=min(outside, key=_speed),
        host_memory=each * smallest.per_node,
        disk_bandwidth=DISK * smallest.per_node,
    )


def _speed(link: Link) -> tuple[float, float]:
    return link.bandwidth, -link.latency


def parse(text: str) -> Cluster:
    """The cluster that a text means. Raises FaultError with all that is wrong with it."""
    from echelon.planning.cluster.cluster_file import read  # it makes clusters

    text = text.strip()
    if text == "here":
        return here()
    if text.endswith(".toml") or os.path.isfile(text):
        return read(text)
    pieces = [_piece(piece.strip()) for piece in text.split("+")]
    faults = [found for found in pieces if isinstance(found, Fault)]
    if faults:
        raise FaultError(faults)
    parts = [part for piece in pieces if not isinstance(piece, Fault) for part in piece[0]]
    links = [piece[1] for piece in pieces if not isinstance(piece, Fault)]
    return joined(text, parts, links)


_PIECE = re.compile(r"(?P<count>-?\d{1,12})\s*[x*]\s*(?P<kind>[a-z0-9._-]+)(:(?P<network>\w*))?", re.IGNORECASE)
_LEGAL = "COUNTxKIND[:ib|:eth|:roce] such as 8xh100, several joined by +, a TOML file, or here"


def _piece(text: str) -> tuple[list[Part], Link] | Fault:
    """The nodes of one kind and what joins them, or what is wrong."""
    match = _PIECE.fullmatch(text)
    if match is None:
        meant = next((kind for kind in KINDS if text.lower().endswith(kind)), "")
        hint = f'did you mean "{re.match(r"[0-9]*", text)[0] or 1}x{meant}"?' if meant else ""  # type: ignore[index]
        return Fault(key="cluster", value=text, rule="cannot be read", legal=_LEGAL, hint=hint)
    count, kind, network = int(match["count"]), match["kind"].lower(), (match["network"] or "ib").lower()
    if not 1 <= count <= MOST:
        return Fault(key="cluster", value=text, rule="has no number of devices", legal=f"1 to {MOST}")
    if kind not in KINDS:
        return _unknown(text, "a kind of device", kind, KINDS)
    if network not in NETWORKS:
        return _unknown(text, "a network", network, NETWORKS)
    parts = list(nodes_of(KINDS[kind], count))
    return parts, _network(network, parts)


def _unknown(text: str, what: str, word: str, words: dict[str, Device] | dict[str, float]) -> Fault:
    rule = f"does not name {what} ({word})"
    return Fault(key="cluster", value=text, rule=rule, legal=", ".join(words), hint=did_you_mean(word, words))


def nodes_of(device: Device, count: int) -> Iterator[Part]:
    """Full nodes as they are sold, and one with the rest."""
    full, rest = divmod(count, device.domain)
    if full:
        yield Part(device=device, nodes=full, per_node=device.domain)
    if rest:
        yield Part(device=device, nodes=1, per_node=rest)


def _network(name: str, parts: Sequence[Part]) -> Link:
    """What each device has of it when all devices of a host send at once."""
    if not NETWORKS[name]:
        return parts[0].device.outside
    sharing = min(max(part.per_node for part in parts), HOST_DEVICES)
    return Link(bandwidth=NETWORKS[name] / sharing, latency=ETHERNET_LATENCY)


# -- this machine -----------------------------------------------------------------------------------------------------


def here(device: str = "auto") -> Cluster:
    """The devices of this machine, one node; its cores, where it has no other or `device` is cpu."""
    import torch  # seconds; only where the machine is asked

    if device == "cpu" or not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        memory = _physical_memory()
        cpu = replace(KINDS["cpu"], memory=memory // cores)
        return replace(joined("here", [Part(device=cpu, nodes=1, per_node=cores)]), host_memory=memory)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    unknown = sorted({properties.name for properties in found if not kind_of(properties.name, properties.total_memory)})
    if unknown:
        rule = f"has devices that planning does not know ({', '.join(unknown)})"
        hint = "describe them in a TOML file, as echelon.planning.cluster.cluster_file says"
        raise FaultError([Fault(key="cluster", value="here", rule=rule, legal=", ".join(KINDS), hint=hint)])
    kinds = sorted((kind_of(p.name, p.total_memory), p.total_memory) for p in found)
    parts = [
        Part(device=replace(KINDS[kind], memory=memory), nodes=1, per_node=len(list(same)))
        for (kind, memory), same in groupby(kinds)
    ]
    return replace(joined("here", parts), host_memory=_physical_memory())


def kind_of(name: str, memory: int) -> str:
    """The kind of a device by the name that its driver gives, or "".

    >>> kind_of("NVIDIA A100-SXM4-80GB", 80 << 30), kind_of("NVIDIA H200", 140 << 30)
    ('a100-80', 'h200')
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    found = [kind for kind in KINDS if kind.partition("-")[0] in words]
    return min(found, key=lambda kind: abs(KINDS[kind].memory - memory), default="")


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
