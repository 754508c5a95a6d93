"""Interleaved pairs: Echelon's step and a peer's, in the same processes, one after the other, first place alternating.

A machine that others use slows both halves of a pair alike, so the median of the pairs' ratios holds still where the
times do not.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import CLIP, CONFIG, ROWS_PER_RANK, RULE, SEED, Batch, batches
from peers import Step
from torch.multiprocessing.spawn import start_processes

from echelon import models
from echelon.layout import Layout
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

WARM_UP = 3
"""Pairs before the first that counts: buffers, caches of DTensor, DDP's buckets."""
LOSS_TOLERANCE = 1e-6
"""Relative. A peer that computes something else is no peer."""
EARLY = 5
"""Pairs whose losses are compared. Later, float32 rounding grows by itself: on random tokens training is chaotic."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One step of each side: seconds of the slowest rank, and the losses."""

    ours: float
    peer: float
    our_loss: float
    peer_loss: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def loss_difference(self) -> float:
        """Relative; infinite where a loss is not a number."""
        difference = abs(self.our_loss - self.peer_loss) / max(1.0, abs(self.peer_loss))
        return difference if math.isfinite(difference) else math.inf


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All pairs of a comparison."""

    ratio: float
    """median"""
    low: float
    """first quartile of the ratios"""
    high: float
    """third quartile of the ratios"""
    ours_s: float
    """median step of ours"""
    peer_s: float
    """median step of the peer"""
    loss_difference: float
    """largest of the early pairs"""
    pairs: int


def summary(pairs: list[Pair]) -> Summary:
    ratios = [pair.ratio for pair in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(pairs) > 1 else ratios * 3
    return Summary(
        ratio=middle,
        low=low,
        high=high,
        ours_s=statistics.median(pair.ours for pair in pairs),
        peer_s=statistics.median(pair.peer for pair in pairs),
        loss_difference=max(pair.loss_difference for pair in pairs[:EARLY]),
        pairs=len(pairs),
    )


Sides = Callable[[Layout], tuple[Step, Step]]
"""makes our step and the peer's, on every rank"""


def measure(layout: Layout, sides: Sides, pairs: int, tick: Callable[[], None]) -> list[Pair]:
    """Runs a comparison in `layout.world` new processes; `tick` is called after each pair, warm-up included."""
    context = mp.get_context("spawn")
    queue: Any = context.SimpleQueue()
    found: list[Pair] = []

    def drain() -> None:
        while not queue.empty():
            warm, pair = queue.get()
            found.extend([] if warm else [pair])
            tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = (layout, sides, pairs, f"file://{folder}/store", queue)
        ranks = start_processes(_rank, arguments, nprocs=layout.world, join=False, start_method="spawn")
        while not ranks.join(timeout=0.1):  # raises with the traceback of a rank that failed
            drain()
        drain()
    return found


def _rank(rank: int, layout: Layout, make: Sides, pairs: int, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    if layout.world > 1:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=layout.world, timeout=timedelta(seconds=120)
        )
    sides = dict(zip(("ours", "peer"), make(layout), strict=True))
    data = batches(layout.batch)
    for index in range(-WARM_UP, pairs):
        order = ("ours", "peer") if index % 2 else ("peer", "ours")
        timed = {name: timed_step(sides[name], data[index % len(data)]) for name in order}
        seconds = slowest([timed["ours"][0], timed["peer"][0]])
        if rank == 0:
            pair = Pair(ours=seconds[0], peer=seconds[1], our_loss=timed["ours"][1], peer_loss=timed["peer"][1])
            queue.put((index < 0, pair))
    if layout.world > 1:
        # A group that outlives its rank has threads, and one that wants Python's lock at exit aborts the process.
        sides.clear()
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def whole_steps(peer: Callable[[], Step], layout: Layout) -> tuple[Step, Step]:
    """Our step, update included, beside a peer's."""
    return our_step(layout), peer()


def our_step(layout: Layout) -> Step:
    engine = Engine(models.build(CONFIG, "meta"), layout, RULE, clip=CLIP, options=ParallelOptions(seed=SEED))
    return lambda batch: engine.step(batch).loss


def timed_step(step: Step, batch: Batch) -> tuple[float, float]:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    loss = step(batch)
    return time.perf_counter() - start, loss


def slowest(seconds: list[float]) -> list[float]:
    """Element by element, the maximum over ranks."""
    together = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return [float(value) for value in together]


def layout_of(text: str) -> Layout:
    """The layout with the benchmark's batch: `ROWS_PER_RANK` sequences for each data-parallel rank."""
    layout = Layout.parse(text)
    return layout.replace(microbatch=ROWS_PER_RANK)
