"""Measures the devices of this machine for `echelon bench`; calibrate/calibration.py uses the results.

A CPU is measured with one thread in fp32: planning treats a core as a device. Every measurement is warmed up, and the
best of several counts, since interference only slows down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from echelon.layout.collective import wire_bytes
from echelon.layout.validation_error import ValidationError
from echelon.planning.cluster.cluster import Cluster, MeasuredCurves, cpu_cores
from echelon.planning.cluster.cluster_file import read_cluster_file
from echelon.planning.cluster.link_time import COLLECTIVES, fit_link
from echelon.planning.cost.step_time import FLASH_BACKWARD_RATIO

if TYPE_CHECKING:
    import torch

RunOnRanks = Callable[..., list[list[float]]]
"""`RankPool.run`: calls a function on ranks of a process group, and returns the result of each"""
MAX_RANKS = 8
"""of CPU collectives"""
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# fmt: off
MATMUL_SHAPES = {
    "cpu": ((64, 64, 64), (128, 64, 192), (128, 128, 128), (256, 128, 512), (256, 256, 256), (512, 128, 128),
            (512, 256, 768), (512, 512, 512), (1024, 256, 256), (1024, 512, 1024), (2048, 512, 512),
            (1024, 1024, 1024)),
    "cuda": ((8192, 512, 1024), (4096, 1024, 1024), (8192, 1024, 1024), (2048, 2048, 2048), (8192, 1024, 4096),
             (8192, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 6144), (8192, 4096, 14336), (8192, 14336, 4096),
             (16384, 8192, 8192), (16384, 8192, 28672)),
}
ATTENTION_SHAPES = {
    "cpu": ((128, 64), (256, 64), (512, 64), (512, 128), (1024, 128)),
    "cuda": ((1024, 64), (2048, 64), (4096, 64), (1024, 128), (2048, 128), (4096, 128), (8192, 128), (16384, 128)),
}
# fmt: on
"""(m, k, n) of a GEMM, (length, head_dim) of attention; small ones measure partly filled tiles"""
ATTENTION_TOKENS = {"cpu": 512, "cuda": 16384}
ATTENTION_WIDTH = {"cpu": 256, "cuda": 2048}
STREAM_BYTES = {"cpu": 256 * MIB, "cuda": GIB}
"""bytes read and written, too many for caches"""
PINNED_BYTES = 256 * MIB
MESSAGE_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
MEMORY_DIVISOR = 8
"""a measurement takes at most 1 / this of the device's memory"""


@dataclass(frozen=True, kw_only=True)
class DeviceMeasurement:
    what: str
    """a field of `MeasuredCurves`"""
    size: tuple[int, ...]
    """sizes of the curve's row; bytes of a copy"""
    seconds: float
    rate: float
    """FLOPs or bytes per second; of a collective, wire bytes"""
    note: str = ""

    @property
    def unit(self) -> str:
        return "FLOP/s" if self.what in ("matmul", "attention") else "B/s"


@dataclass(frozen=True, kw_only=True)
class BenchStep:
    """A step of the benchmark, for a progress bar."""

    name: str
    run: Callable[[], list[DeviceMeasurement]]


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """A repeated measurement on one device."""

    what: str
    size: tuple[int, ...]
    work: float
    """FLOPs or bytes"""
    prepare: Callable[[], Callable[[], object]]
    """allocates tensors, and returns the function to time"""
    note: str = ""


def read_description(path: str) -> Cluster:
    """The cluster of a file that describes the devices of this machine; its nodes must have as many."""
    import torch

    cluster, has_gpus = read_cluster_file(path), torch.cuda.is_available()
    here = torch.cuda.device_count() if has_gpus else cpu_cores()
    if (cluster.device.generation != "cpu", cluster.per_node) != (has_gpus, here):
        devices = f"{here} {'GPUs' if has_gpus else 'CPU cores'}"
        rule = f"does not describe this machine, which has {devices}"
        legal = f"per_node={here}" + ("" if has_gpus else ', generation="cpu"')
        raise ValidationError.single("--cluster", path, rule, legal=legal)
    return cluster


def bench_steps(cluster: Cluster, *, quick: bool, on_ranks: RunOnRanks) -> list[BenchStep]:
    """All measurements of this machine, in order."""
    import torch

    device = torch.device("cuda" if cluster.device.generation != "cpu" else "cpu")
    dtype = {"cpu": torch.float32, "volta": torch.float16}.get(cluster.device.generation, torch.bfloat16)
    steps = [
        BenchStep(name=f"{probe.what} {format_size(probe.size)}", run=partial(_measure_probe, probe, device, quick))
        for probe in _probes(device, dtype, cluster.memory // MEMORY_DIVISOR)
    ]
    ranks = min(cluster.per_node, MAX_RANKS) if device.type == "cpu" else cluster.per_node
    if ranks > 1:
        sizes = [size for size in MESSAGE_SIZES if size <= (4 if quick else 64) * MIB]
        steps += [
            BenchStep(name=kind, run=partial(_measure_collective, kind, ranks, sizes, quick, device.type, on_ranks))
            for kind in COLLECTIVES
        ]
    return steps


def to_curves(rows: Sequence[DeviceMeasurement]) -> MeasuredCurves:
    curves: dict[str, Any] = {}
    for name in ("matmul", "attention"):
        curves[name] = tuple((*row.size, row.rate) for row in rows if row.what == name)
    for name in COLLECTIVES:
        curves[name] = tuple((row.size[0], row.seconds) for row in rows if row.what == name)
    return MeasuredCurves(
        memory=max((row.rate for row in rows if row.what == "memory"), default=0.0),
        host=min((row.rate for row in rows if row.what == "host"), default=0.0),  # the slower direction
        **curves,
    )


def with_curves(cluster: Cluster, curves: MeasuredCurves) -> Cluster:
    """The cluster with its curves. A CPU has no specified peaks: the measured ones replace them."""
    if cluster.device.generation == "cpu" and curves.matmul and curves.memory:
        peak = max(row[-1] for row in curves.matmul)
        rates: dict[str, Any] = {"flops": {"fp32": peak, "bf16": peak}, "bandwidth": curves.memory}
        cluster = cluster.with_devices(lambda device: replace(device, **rates))
        cluster = replace(cluster, intra_node=fit_link(curves, cluster.per_node) or cluster.intra_node)
    return replace(cluster, curves=curves)


def format_size(size: Sequence[int]) -> str:
    """`4096 x 4096 x 4096`, or `64 KiB`."""
    if len(size) > 1:
        return " x ".join(f"{count}" for count in size)
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if size[0] >= unit)
    return f"{size[0] // unit} {name}"


def _probes(device: torch.device, dtype: torch.dtype, max_bytes: int) -> Iterator[_Probe]:
    import torch

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def matmul(m: int, k: int, n: int) -> Callable[[], object]:
        inputs, weights, gradient = random(m, k), random(n, k), random(m, n)
        outputs, of_inputs, of_weights = (torch.empty_like(tensor) for tensor in (gradient, inputs, weights))

        def forward_backward() -> None:
            torch.mm(inputs, weights.t(), out=outputs)
            torch.mm(gradient, weights, out=of_inputs)
            torch.mm(gradient.t(), inputs, out=of_weights)

        return forward_backward

    def attention(length: int, head_dim: int, rows: int, heads: int) -> Callable[[], object]:
        q, k, v = (random(rows, heads, length, head_dim).requires_grad_() for _ in range(3))
        gradient = random(rows, heads, length, head_dim)

        def forward_backward() -> object:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), gradient)

        return forward_backward

    def stream(size: int) -> Callable[[], object]:
        read = torch.ones(size // dtype.itemsize, device=device, dtype=dtype)
        written = torch.empty_like(read)
        return lambda: torch.add(read, 1.0, out=written)

    def copy(size: int, to_host: bool) -> Callable[[], object]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        here = torch.empty(size, dtype=torch.uint8, device=device)
        target, source = (host, here) if to_host else (here, host)
        return lambda: target.copy_(source, non_blocking=True)

    kind = device.type
    for m, k, n in MATMUL_SHAPES[kind]:
        if 2 * (m * k + k * n + m * n) * dtype.itemsize <= max_bytes:
            yield _Probe(what="matmul", size=(m, k, n), work=6.0 * m * k * n, prepare=partial(matmul, m, k, n))
    for length, head_dim in ATTENTION_SHAPES[kind]:
        rows, heads = max(1, ATTENTION_TOKENS[kind] // length), ATTENTION_WIDTH[kind] // head_dim
        if 10 * rows * heads * length * head_dim * dtype.itemsize <= max_bytes:
            flops = (1 + FLASH_BACKWARD_RATIO) * (2.0 * rows * heads * length * length * head_dim)
            prepare = partial(attention, length, head_dim, rows, heads)
            yield _Probe(what="attention", size=(length, head_dim), work=flops, prepare=prepare)
    size = min(STREAM_BYTES[kind], max_bytes // 2)
    yield _Probe(what="memory", size=(size,), work=2.0 * size, prepare=partial(stream, size), note="read and written")
    if kind == "cuda":
        for to_host, note in ((False, "to the device"), (True, "to the host")):
            prepare = partial(copy, PINNED_BYTES, to_host)
            yield _Probe(what="host", size=(PINNED_BYTES,), work=PINNED_BYTES, prepare=prepare, note=note)


def _measure_probe(probe: _Probe, device: torch.device, quick: bool) -> list[DeviceMeasurement]:
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = (_time_on_cuda if device.type == "cuda" else _time_on_cpu)(probe.prepare(), quick)
    finally:
        torch.set_num_threads(num_threads)
    rate = probe.work / seconds
    return [DeviceMeasurement(what=probe.what, size=probe.size, seconds=seconds, rate=rate, note=probe.note)]


def _time_on_cpu(once: Callable[[], object], quick: bool) -> float:
    """Best thread time of at least three runs; the clock of a thread stops while others have the core."""
    once()
    seconds: list[float] = []
    end = time.perf_counter() + (0.05 if quick else 0.4)
    while len(seconds) < 3 or time.perf_counter() < end:
        begun = time.thread_time()
        once()
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def _time_on_cuda(once: Callable[[], object], quick: bool) -> float:
    """Best of several rounds of enough runs that the device never waits for the host."""
    import torch

    def round_of(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            once()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    for _ in range(3):
        once()
    count = max(3, int((0.01 if quick else 0.05) / round_of(3)))
    return min(round_of(count) for _ in range(3 if quick else 6))


def _measure_collective(
    collective: str, ranks: int, sizes: list[int], quick: bool, device: str, on_ranks: RunOnRanks
) -> list[DeviceMeasurement]:
    """Measure a collective over its sizes; its time is that of the slowest rank."""
    by_rank = on_ranks(time_collective, ranks, collective, sizes, 5 if quick else 10, device)
    slowest = [(size, max(seconds)) for size, *seconds in zip(sizes, *by_rank, strict=True)]
    rows = [(size, seconds, wire_bytes(collective, size, ranks) / seconds) for size, seconds in slowest]
    return [DeviceMeasurement(what=collective, size=(size,), seconds=s, rate=rate) for size, s, rate in rows]


def time_collective(collective: str, sizes: list[int], repeats: int, device: str) -> list[float]:
    """On every rank: best seconds of a collective by size. The process group is gloo's; CUDA adds NCCL's."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = None
    if device == "cuda":
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
    best_seconds = []
    for size in sizes:
        tensor = torch.zeros(size // 4 // ranks * ranks, device=device)
        once = _collective_call(collective, tensor, rank, ranks, group)
        best = float("inf")
        for repeat in range(repeats + 1):
            dist.barrier()
            begun = time.perf_counter()
            once()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first run connects
                best = min(best, time.perf_counter() - begun)
        best_seconds.append(best)
    return best_seconds


def _collective_call(collective: str, tensor: torch.Tensor, rank: int, ranks: int, group: Any) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    from echelon import compat

    shard, output = tensor.chunk(ranks)[rank].clone(), torch.empty_like(tensor)

    def send() -> None:
        if rank == 0:
            dist.send(tensor, 1, group=group)
        elif rank == 1:
            dist.recv(tensor, 0, group=group)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "all_gather": lambda: compat.start_all_gather(tensor, shard, group).wait(),
        "reduce_scatter": lambda: compat.start_reduce_scatter(shard, tensor, group).wait(),
        "all_to_all": lambda: dist.all_to_all_single(output, tensor, group=group),
        "send": send,
    }
    return calls[collective]
