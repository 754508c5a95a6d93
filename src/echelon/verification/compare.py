"""One rank of a comparison: run the layout, and compare every local piece with the truth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.placement import Piece
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.grad_norm import clip_factor
from echelon.training.step_result import StepResult
from echelon.verification.verify_case import VerifyCase


@dataclass(frozen=True)
class Difference:
    """The largest error of one quantity on one rank."""

    step: int
    kind: str
    """loss, norm, gradient, parameter or buffer"""
    name: str
    error: float
    """max|a-b| over the rank's elements, divided by max(1, max|b|) over the full tensor"""


@dataclass(frozen=True)
class RankReport:
    """The errors that one rank finds, and the elements that it owns."""

    differences: tuple[Difference, ...]
    owned_elements: dict[str, int]
    """of each parameter, those that this rank owns"""
    parameter_elements: dict[str, int]
    """of each full parameter that this rank holds a piece of"""
    parameter_names: tuple[str, ...]
    """all parameters, in the order of the model"""
    collective_skipped: bool
    """whether the run issued the collective to leave out"""


def run_and_compare(case: VerifyCase, layout_text: str, leave_out: str, truth: Path) -> RankReport:
    layout = Layout.parse(layout_text)
    options = ParallelOptions(
        compute_dtype=torch.float64, master_dtype=torch.float64, seed=case.seed, drop_collective=leave_out
    )
    engine = Engine(case.build("meta"), layout, case.optimizer, clip=case.clip, options=options)
    engine.model.train()
    differences: list[Difference] = []
    asynchronous = layout.schedule in ASYNC_SCHEDULES
    with safe_open(truth, framework="pt") as record:
        for step in range(case.steps):
            result = engine.step(case.batch(step, layout.batch))
            differences += _scalar_differences(step, result, record, ("loss",) if asynchronous else ("loss", "norm"))
            if asynchronous:
                continue
            clipped = float(clip_factor(torch.tensor(result.norm, dtype=torch.float64), case.clip))
            # Undo clipping by the layout's own norm: the norm is compared on its own.
            differences += _piece_differences(step, engine, record, "gradient", scale=1.0 / clipped)
            differences += _piece_differences(step, engine, record, "parameter")
            for name, buffer in engine.model.named_buffers():
                full = record.get_tensor(f"{step}/buffer/{name}")
                differences.append(Difference(step, "buffer", name, relative_error(buffer.double(), full, full)))
        if asynchronous:
            engine.drain()
            differences += _piece_differences(case.steps - 1, engine, record, "parameter")
    pieces = [piece for _, piece in engine.parallel.sharded_model.pieces()]
    owned = {
        piece.param.name: sum(stop - start for start, stop in piece.unpadded_runs())
        for piece in pieces
        if piece.is_owner and piece.is_first_replica
    }
    sizes = {name: torch.Size(param.shape).numel() for name, param in engine.parallel.placement.params.items()}
    return RankReport(tuple(differences), owned, sizes, engine.param_names, engine.parallel.axes.dropped_any)


def _piece_differences(
    step: int, engine: Engine, record: safe_open, kind: str, scale: float = 1.0
) -> Iterator[Difference]:
    for group, piece in engine.parallel.sharded_model.pieces():
        if kind == "parameter" or piece.param.trainable:
            values = group.master.values() if kind == "parameter" else group.grad
            local, name = engine.parallel.sharded_model.piece_view(values, piece) * scale, piece.param.name
            full = record.get_tensor(f"{step}/{kind}/{name}")
            yield Difference(step, kind, name, relative_error(local, expected_piece(full, piece), full))


def _scalar_differences(step: int, result: StepResult, record: safe_open, kinds: Sequence[str]) -> Iterator[Difference]:
    for kind in kinds:
        value, truth = torch.tensor(getattr(result, kind), dtype=torch.float64), record.get_tensor(f"{step}/{kind}")
        yield Difference(step, kind, "", relative_error(value, truth, truth))


def expected_piece(full_tensor: Tensor, piece: Piece) -> Tensor:
    """The expected values of a piece of a logical tensor; padding is zero."""
    part = full_tensor[tuple(slice(low, high) for low, high in piece.box)]
    padded = full_tensor.new_zeros(piece.param.local_shape)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded.reshape(-1)[piece.start : piece.stop]


def relative_error(value: Tensor, truth: Tensor, full_tensor: Tensor) -> float:
    """max|a-b| / max(1, max|b|); NaN counts as infinite."""
    if value.numel() == 0:
        return 0.0
    largest = float((value - truth).abs().max()) / max(1.0, float(full_tensor.abs().max()))
    return largest if largest == largest else float("inf")
