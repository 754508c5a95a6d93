"""Measurements as rows: rates, shares of the peak, and how we stand beside the best peer of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.bench.bench_request import family
from echelon.bench.measurement import US, Request
from echelon.bench.subprocess_bench import Found
from echelon.memory.checkpointing.cost import repeats
from echelon.training.logging import metrics


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Numbers are none where it failed."""

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
    """of our own rows: the fastest of the others with this shape and precision"""
    ratio: float | None = None
    """our tokens per second over that peer's; more than 1 is faster"""
    failed: str | None = None
    """why there are no numbers"""
    versions: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.who == US

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row_of(request: Request, found: Found, peak: float) -> Row:
    """`peak` is the device's, in bf16 FLOP/s."""
    row = Row(
        shape=request.shape,
        seq=request.seq_len,
        batch=request.batch,
        precision=request.precision,
        who=request.who,
        recompute=request.recompute,
        states=request.states,
    )
    if "failed" in found:
        return replace(row, failed=found["failed"])
    model, rate = request.model, request.tokens / found["step_s"]
    flops = model.flops_per_token(request.seq_len)
    repeated = repeats(request.recompute, layers=model.layers, whole=1.0, entry=0.0)
    attention = flops - model.flops_per_token(0)
    again = metrics.recomputed_flops(repeated, flops - 6 * model.vocab * model.width, attention)
    return replace(
        row,
        step_s=found["step_s"],
        tokens_per_s=rate,
        mfu=metrics.mfu(flops, rate, peak),
        hfu=metrics.hfu(flops, rate, peak, recomputed=again),
        peak_bytes=found["peak_bytes"],
        first_step_s=found["first_step_s"],
        versions=(found["version"], f"torch {found['torch']}"),
    )


def compared(rows: Sequence[Row]) -> list[Row]:
    """The same rows, ours with the best peer beside them."""
    return [_beside(row, rows) if row.is_ours else row for row in rows]


def _beside(row: Row, rows: Sequence[Row]) -> Row:
    if row.tokens_per_s is None:
        return row
    same = (row.shape, row.seq, family(row.precision))
    others = [
        (other.tokens_per_s, other.who)
        for other in rows
        if not other.is_ours
        and other.tokens_per_s is not None
        and (other.shape, other.seq, family(other.precision)) == same
    ]
    if not others:
        return row
    rate, name = max(others)
    return replace(row, peer=name, ratio=row.tokens_per_s / rate)
