"""Device kinds with their vendors' specifications, and their links.

Peaks are dense (without sparsity). calibrate/constants.py has the share of them that programs reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 1 << 30
GEMM_DTYPES = ("fp4", "fp8", "bf16", "fp16", "fp32")
"""of GEMMs, the narrowest first"""
FULL_POWER = {"ampere": 1.28, "hopper": 0.707, "blackwell": 0.56}
"""watts for each TFLOP/s of the bf16 peak, of the devices of a generation with the most (A100, H100, GB300): efficiency
is that of theirs"""
DEFAULT_GENERATION = "npu"
"""of a device that planning does not know: of the share of its peak that accelerators other than NVIDIA's reach"""
POWER_EXPONENT = 1 / 2
"""of the power limit in the clock that a device holds: near its lowest voltage, power grows with the square of it"""


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    bandwidth: float
    """bytes per second and direction of each device, all sending at once"""
    latency: float
    """seconds until a collective moves its first byte, with its launch"""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    name: str
    generation: str
    """volta, ampere, hopper, blackwell, amd, tpu, npu or cpu; efficiency is fitted per generation"""
    flops: dict[str, float] = field(hash=False)
    """peak per second by dtype: bf16, fp16, fp8, fp4, fp32"""
    memory: int
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
    """at full load; 0: not stated"""
    price: float
    """US dollars an hour, a round figure for objective=cost; a cluster file can override it"""

    def peak(self, dtype: str) -> float:
        """Peak FLOPs of a dtype, or of the next wider one that the device supports."""
        return next(self.flops[name] for name in GEMM_DTYPES[GEMM_DTYPES.index(dtype) :] if name in self.flops)

    def supports(self, dtype: str) -> bool:
        """Whether it multiplies a dtype, or the next wider one in place of 16 bits."""
        wider = GEMM_DTYPES[GEMM_DTYPES.index(dtype) :] if dtype in ("bf16", "fp16") else (dtype,)
        return any(name in self.flops for name in wider)

    @property
    def driver_name(self) -> str:
        """What the names that drivers report of its devices contain: `A100` of both memory sizes, `TPU v4`."""
        model, _, variant = self.name.partition("-")
        return f"{model.upper()} {variant}" if self.generation == "tpu" else model.upper()

    @property
    def power_share(self) -> float:
        """Share of its clock that a device holds in GEMMs, to one of its generation with more watts for each FLOP."""
        full = FULL_POWER.get(self.generation, 0.0) * self.peak("bf16") / 1e12
        return min(1.0, (self.watts / full) ** POWER_EXPONENT) if self.watts and full else 1.0


_AMPERE = {"bf16": 312, "fp16": 312, "fp32": 156}
_HOPPER = {"bf16": 989.5, "fp16": 989.5, "fp8": 1979, "fp32": 494}
_B200 = {"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000, "fp32": 1100}
_B300 = {"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 13500, "fp32": 1100}
_GB200 = {"bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000, "fp32": 1250}
_GB300 = {"bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 15000, "fp32": 1250}

_DEVICES = (
    # name, generation, TFLOP/s, GiB, memory TB/s, GB/s in a node, between nodes and to the host, domain, watts, price
    ("v100", "volta", {"fp16": 125, "fp32": 15.7}, 16, 0.90, 150, 12.5 / 8, 12, 8, 300, 1.0),
    ("a100-40", "ampere", _AMPERE, 40, 1.555, 300, 25, 25, 8, 400, 1.2),
    ("a100-80", "ampere", _AMPERE, 80, 2.039, 300, 25, 25, 8, 400, 1.5),
    ("h100", "hopper", _HOPPER, 80, 3.35, 450, 50, 50, 8, 700, 2.5),
    ("h800", "hopper", _HOPPER, 80, 3.35, 200, 50, 50, 8, 700, 2.5),
    ("h200", "hopper", _HOPPER, 140, 4.8, 450, 50, 50, 8, 700, 3.0),
    ("b200", "blackwell", _B200, 180, 7.7, 900, 50, 50, 8, 1000, 4.5),
    ("b300", "blackwell", _B300, 270, 7.7, 900, 100, 50, 8, 1200, 5.5),
    ("gb200", "blackwell", _GB200, 185, 8.0, 900, 50, 200, 72, 1200, 5.0),
    ("gb300", "blackwell", _GB300, 275, 8.0, 900, 100, 200, 72, 1400, 6.0),
    ("l40s", "ampere", {"bf16": 362, "fp16": 362, "fp8": 733, "fp32": 91.6}, 48, 0.864, 25, 6.25, 25, 8, 350, 0.9),
    ("rtx4090", "ampere", {"bf16": 165, "fp16": 165, "fp8": 330, "fp32": 82.6}, 24, 1.008, 20, 6.25, 25, 8, 450, 0.5),
    # one of its two dies, as programs see it
    ("mi250x", "amd", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}, 64, 1.638, 100, 12.5, 25, 8, 280, 0.8),
    ("mi300x", "amd", {"bf16": 1307, "fp16": 1307, "fp8": 2615, "fp32": 163}, 192, 5.3, 448, 50, 50, 8, 750, 2.5),
    ("mi325x", "amd", {"bf16": 1307, "fp16": 1307, "fp8": 2615, "fp32": 163}, 256, 6.0, 448, 50, 50, 8, 1000, 3.0),
    (
        "mi355x",
        "amd",
        {"bf16": 2517, "fp16": 2517, "fp8": 5033, "fp4": 10066, "fp32": 157},
        288,
        8.0,
        537,
        50,
        50,
        8,
        1400,
        4.5,
    ),
    ("gaudi3", "npu", {"bf16": 1678, "fp16": 839, "fp8": 1678, "fp32": 229}, 128, 3.7, 525, 75, 25, 8, 900, 2.0),
    ("ascend910b", "npu", {"bf16": 376, "fp16": 376, "fp32": 94}, 64, 1.6, 196, 25, 25, 8, 400, 1.0),
    ("tpu-v4", "tpu", {"bf16": 275, "fp32": 68}, 32, 1.2, 150, 25, 15, 64, 200, 1.6),
    ("tpu-v5e", "tpu", {"bf16": 197, "fp32": 49}, 16, 0.82, 100, 12.5, 15, 256, 200, 0.6),
    ("tpu-v5p", "tpu", {"bf16": 459, "fp32": 115}, 95, 2.765, 300, 25, 15, 256, 400, 2.1),
)
DEVICE_KINDS = {
    name: DeviceKind(
        name=name,
        generation=generation,
        flops={dtype: tera * 1e12 for dtype, tera in flops.items()},
        memory=int(gib * GIB),
        bandwidth=bandwidth * 1e12,
        intra_node=LinkSpec(bandwidth=intra_node * 1e9, latency=3e-5),
        inter_node=LinkSpec(bandwidth=inter_node * 1e9, latency=4e-5),
        nvlink_domain=domain,
        host_link=LinkSpec(bandwidth=host * 1e9, latency=1e-5),
        watts=watts,
        price=price,
    )
    for name, generation, flops, gib, bandwidth, intra_node, inter_node, host, domain, watts, price in _DEVICES
}
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
