"""Device kinds with their vendors' specifications, and their links.

Peaks are dense (without sparsity). calibrate/constants.py has the share of them that programs reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """Bandwidth and latency of a link."""

    bandwidth: float
    """bytes per second and direction of each device, all sending at once"""
    latency: float
    """seconds until a collective moves its first byte, with its launch"""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    name: str
    generation: str
    """volta, ampere, hopper, blackwell or cpu; efficiency is fitted per generation"""
    flops: dict[str, float] = field(hash=False)
    """peak per second by dtype: bf16, fp16, fp8, fp4, fp32"""
    memory: int
    """bytes"""
    bandwidth: float
    """memory bandwidth, bytes per second"""
    intra_node: LinkSpec
    """between devices of a node (or of one NVLink domain)"""
    nvlink_domain: int
    """devices of a usual node, joined by `intra_node`"""
    inter_node: LinkSpec
    """between nodes: the usual InfiniBand"""
    host_link: LinkSpec
    """to host memory, PCIe or faster"""
    watts: float
    """at full load, for objective=energy"""
    price: float
    """US dollars an hour, a round figure for objective=cost; a cluster file can override it"""

    def peak(self, dtype: str) -> float:
        """Peak FLOPs of a dtype, or of the next wider one that the device supports."""
        order = ("fp4", "fp8", "bf16", "fp16", "fp32")
        return next(self.flops[name] for name in order[order.index(dtype) :] if name in self.flops)


def _nvidia(
    name: str,
    generation: str,
    tera: Mapping[str, float],
    gib: float,
    memory: float,
    inside: float,
    outside: float,
    *,
    domain: int = 8,
    host: float = 25,
    watts: float,
    price: float,
) -> DeviceKind:
    return DeviceKind(
        name=name,
        generation=generation,
        flops={key: value * 1e12 for key, value in tera.items()},
        memory=int(gib * GIB),
        bandwidth=memory * 1e12,
        intra_node=LinkSpec(bandwidth=inside * 1e9, latency=3e-5),
        inter_node=LinkSpec(bandwidth=outside * 1e9, latency=4e-5),
        nvlink_domain=domain,
        host_link=LinkSpec(bandwidth=host * 1e9, latency=1e-5),
        watts=watts,
        price=price,
    )


_AMPERE = {"bf16": 312, "fp16": 312, "fp32": 156}
_HOPPER = {"bf16": 989.5, "fp16": 989.5, "fp8": 1979, "fp32": 494}
_B200 = {"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000, "fp32": 1100}
_B300 = {"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 13500, "fp32": 1100}
_GB200 = {"bf16": 2450, "fp16": 2450, "fp8": 4900, "fp4": 9800, "fp32": 1200}
_GB300 = {"bf16": 2450, "fp16": 2450, "fp8": 4900, "fp4": 14700, "fp32": 1200}

# fmt: off
DEVICE_KINDS: dict[str, DeviceKind] = {device.name: device for device in (
    _nvidia("v100", "volta", {"fp16": 125, "fp32": 15.7}, 16, 0.90, 150, 12.5 / 8, host=12, watts=300, price=1.0),
    _nvidia("a100-40", "ampere", _AMPERE, 40, 1.555, 300, 25, watts=400, price=1.2),
    _nvidia("a100-80", "ampere", _AMPERE, 80, 2.039, 300, 25, watts=400, price=1.5),
    _nvidia("h100", "hopper", _HOPPER, 80, 3.35, 450, 50, host=50, watts=700, price=2.5),
    _nvidia("h800", "hopper", _HOPPER, 80, 3.35, 200, 50, host=50, watts=700, price=2.5),
    _nvidia("h200", "hopper", _HOPPER, 140, 4.8, 450, 50, host=50, watts=700, price=3.0),
    _nvidia("b200", "blackwell", _B200, 180, 7.7, 900, 50, host=50, watts=1000, price=4.5),
    _nvidia("b300", "blackwell", _B300, 270, 7.7, 900, 100, host=50, watts=1200, price=5.5),
    _nvidia("gb200", "blackwell", _GB200, 185, 8.0, 900, 50, domain=72, host=200, watts=1200, price=5.0),
    _nvidia("gb300", "blackwell", _GB300, 275, 8.0, 900, 100, domain=72, host=200, watts=1400, price=6.0),
)}
# fmt: on
DEVICE_KINDS["cpu"] = DeviceKind(
    name="cpu",
    generation="cpu",
    flops={"fp32": 5e10, "bf16": 5e10},
    memory=4 * GIB,
    bandwidth=1e10,
    intra_node=LinkSpec(bandwidth=1e9, latency=1e-4),
    nvlink_domain=8,
    inter_node=LinkSpec(bandwidth=1e8, latency=2e-4),
    host_link=LinkSpec(bandwidth=1e10, latency=1e-6),
    watts=10,
    price=0.05,
)


def find_device(name: str) -> DeviceKind:
    """The device kind of a name."""
    if name in DEVICE_KINDS:
        return DEVICE_KINDS[name]
    fault = ValidationIssue(
        key="cluster",
        value=name,
        message="is an unknown device kind",
        legal=", ".join(DEVICE_KINDS),
        hint=did_you_mean(name, DEVICE_KINDS),
    )
    raise ValidationError([fault])
