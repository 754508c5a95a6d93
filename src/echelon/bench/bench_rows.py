"""The result rows of a benchmark: tokens per second, MFU, HFU, and the ratio to the best peer of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.bench.bench_request import precision_family
from echelon.bench.measurement import ECHELON, Measurement
from echelon.bench.subprocess_bench import BenchResult
from echelon.memory.checkpointing.cost import recompute_work
from echelon.training.logging import metrics


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One measured step; its numbers are None if it failed."""

    shape: str
    seq: int
    batch: int
    precision: str
    who: str
    recompute: str
    states: str
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_bytes: int | None = None
    first_step_s: float | None = None
    """from the start of the process to the end of its first step"""
    peer: str | None = None
    """in our rows: the fastest peer with this shape and precision"""
    ratio: float | None = None
    """our tokens per second over the peer's: above 1 we are faster"""
    failed: str | None = None
    """the reason of a failure"""
    versions: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.who == ECHELON

    @property
    def workload(self) -> tuple[str, int, str]:
        """What rows must share to be compared."""
        return self.shape, self.seq, precision_family(self.precision)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_row(measurement: Measurement, result: BenchResult, peak: float) -> BenchRow:
    """The row of a result; `peak` is the device's bf16 peak in FLOP/s."""
    row = BenchRow(who=measurement.who, **measurement.settings)
    if "failed" in result:
        return replace(row, failed=result["failed"])
    model, rate = measurement.model, measurement.tokens / result["step_s"]
    flops = model.flops_per_token(measurement.seq_len)
    work = recompute_work(measurement.recompute, layers=model.layers, layer_bytes=1.0, input_bytes=0.0)
    attention = flops - model.flops_per_token(0)
    recomputed = metrics.recomputed_flops(work, flops - 6 * model.vocab * model.width, attention)
    return replace(
        row,
        step_s=result["step_s"],
        tokens_per_s=rate,
        mfu=metrics.mfu(flops, rate, peak),
        hfu=metrics.hfu(flops, rate, peak, recomputed=recomputed),
        peak_bytes=result["peak_bytes"],
        first_step_s=result["first_step_s"],
        versions=(result["version"], f"torch {result['torch']}"),
    )


def add_peer_ratios(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows, ours with the best peer and the ratio to it."""
    return [_with_best_peer(row, rows) if row.is_ours else row for row in rows]


def _with_best_peer(row: BenchRow, rows: Sequence[BenchRow]) -> BenchRow:
    if row.tokens_per_s is None:
        return row
    peers = [other for other in rows if not other.is_ours and other.workload == row.workload]
    rates = [(peer.tokens_per_s, peer.who) for peer in peers if peer.tokens_per_s is not None]
    if not rates:
        return row
    rate, name = max(rates)
    return replace(row, peer=name, ratio=row.tokens_per_s / rate)
