"""One rank of a comparison: run the layout, and compare every local piece with the truth.

[Note: equal gradients]

In float64 a layout's gradients are compared with the truth's when they are complete, and then replaced by them. So the
update rules start from equal gradients. Without this, rules that take a sign or divide by a root would turn rounding
errors into differences of a learning rate, wherever a gradient is zero but for rounding (a key's bias, for example).
Nothing is missed: each gradient of each step is compared, and so is each weight that an update makes of them.

As configured, in few bits, nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.placement import Piece
from echelon.parallel.dp.param_group import ParamGroup
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_settings, parallel_options
from echelon.training.step_result import StepResult
from echelon.verification.verify_case import VerifyCase

GRADIENT_FLOOR, PARAMETER_FLOOR = 1e-6, 1e-6
"""smallest norm that an error is relative to: of gradients, as a share of the norm of all; of parameters, per root of
their elements. Below, a tensor is zero but for rounding"""


@dataclass(frozen=True)
class Difference:
    """The largest error of one quantity on one rank."""

    step: int
    kind: str
    """loss, norm, gradient, parameter, average or buffer"""
    name: str
    error: float
    """max|a-b| over the rank's elements, divided by max(1, max|b|) over the full tensor"""
    relative: float
    """norm of a-b over the rank's elements, divided by that of b over the full tensor"""


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
    engine = build_engine(case, layout, leave_out)
    asynchronous = layout.schedule in ASYNC_SCHEDULES
    differences: list[Difference] = []
    with safe_open(truth, framework="pt") as record:
        comparison = _Comparison(engine, record, differences)
        gradients = None if asynchronous else ComparedGradients(comparison, replace_them=case.is_float64)
        for step in range(case.steps):
            comparison.step = step
            result = engine.step(case.batch(step, layout.batch), lr=case.learning_rate(step))
            comparison.scalars(result, ("loss",) if gradients is None else ("loss", "norm"))
            if gradients is not None:
                engine.drain()
                comparison.parameters()
        if asynchronous:
            engine.drain()
            comparison.parameters()
    engine.close()
    pieces = [piece for _, piece in engine.parallel.sharded_model.pieces()]
    owned = {
        piece.param.name: sum(stop - start for start, stop in piece.unpadded_runs())
        for piece in pieces
        if piece.is_owner and piece.is_first_replica
    }
    sizes = {name: torch.Size(param.shape).numel() for name, param in engine.parallel.placement.params.items()}
    return RankReport(tuple(differences), owned, sizes, engine.param_names, engine.parallel.axes.dropped_any)


def build_engine(case: VerifyCase, layout: Layout, leave_out: str = "") -> Engine:
    """The engine of a run with the case's configuration."""
    device = torch.device("cuda", torch.cuda.current_device()) if case.config.device == "cuda" else torch.device("cpu")
    options = replace(parallel_options(case.config, device), drop_collective=leave_out)
    if not case.config.memory.disk:
        options = replace(options, disk_dir="")
    scale = loss_scale_settings(case.config)
    model = case.build("meta", double=case.is_float64)
    engine = Engine(model, layout, case.optimizer, clip=case.clip, options=options, loss_scale=scale)
    engine.model.train()
    return engine


class _Comparison:
    """Compares what an engine holds with the truth's record of a step."""

    def __init__(self, engine: Engine, record: safe_open, differences: list[Difference]):
        self.engine, self.record, self.differences = engine, record, differences
        self.step = 0

    def truth(self, kind: str, name: str = "") -> Tensor:
        tensor: Tensor = self.record.get_tensor(f"{self.step}/{kind}/{name}" if name else f"{self.step}/{kind}")
        return tensor

    def scalars(self, result: StepResult, kinds: Sequence[str]) -> None:
        for kind in kinds:
            truth = self.truth(kind)
            self._add(kind, "", torch.tensor(getattr(result, kind), dtype=torch.float64), truth, truth, 0.0)

    def parameters(self) -> None:
        """Compare weights, their moving average and buffers."""
        sharded_model = self.engine.parallel.sharded_model
        for group, piece in sharded_model.pieces():
            self.piece("parameter", piece, sharded_model.piece_view(group.master.values(), piece))
        for state in self.engine.ema.named_states() if self.engine.ema is not None else ():
            self.piece("average", state.piece, state.read())
        for name, buffer in self.engine.model.named_buffers():
            full = self.truth("buffer", name)
            self._add("buffer", name, buffer, full, full, _parameter_floor(full))

    def piece(self, kind: str, piece: Piece, local: Tensor) -> Tensor:
        """Compare a piece; return the truth's."""
        full = self.truth(kind, piece.param.name)
        expected = expected_piece(full, piece)
        floor = GRADIENT_FLOOR * float(self.truth("norm")) if kind == "gradient" else _parameter_floor(full)
        self._add(kind, piece.param.name, local, expected, full, floor)
        return expected

    def _add(self, kind: str, name: str, local: Tensor, expected: Tensor, full: Tensor, floor: float) -> None:
        local = local.detach().to("cpu", torch.float64)
        error, relative = absolute_error(local, expected, full), relative_error(local, expected, full, floor)
        self.differences.append(Difference(self.step, kind, name, error, relative))


class ComparedGradients:
    """Stands in for `Engine.partial_gradients`, after which gradients are complete: see [Note: equal gradients]."""

    def __init__(self, comparison: _Comparison, *, replace_them: bool):
        self._comparison, self._replace_them, engine = comparison, replace_them, comparison.engine
        self._partial_gradients, engine.partial_gradients = engine.partial_gradients, self  # type: ignore[assignment]
        self._reduce, engine.normalizer.reduce = engine.normalizer.reduce, self._reduce_totals  # type: ignore[method-assign]
        self._grad_scale = torch.ones(())

    def _reduce_totals(self, totals: Tensor) -> Tensor:
        self._grad_scale = self._reduce(totals)
        return self._grad_scale

    def all_reduce(self, only: ParamGroup | None = None) -> None:
        self._partial_gradients.all_reduce(only)
        engine, scale = self._comparison.engine, float(self._grad_scale)
        for group, piece in engine.parallel.sharded_model.pieces():
            if piece.param.trainable and (only is None or group is only):
                local = engine.parallel.sharded_model.piece_view(group.grad, piece)
                expected = self._comparison.piece("gradient", piece, local.double() * scale)
                if self._replace_them:
                    local.copy_(expected / scale)


def _parameter_floor(full: Tensor) -> float:
    return float(PARAMETER_FLOOR * full.numel() ** 0.5)


def expected_piece(full_tensor: Tensor, piece: Piece) -> Tensor:
    """The expected values of a piece of a logical tensor; padding is zero."""
    part = full_tensor[tuple(slice(low, high) for low, high in piece.box)]
    padded = full_tensor.new_zeros(piece.param.local_shape)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded.reshape(-1)[piece.start : piece.stop]


def absolute_error(value: Tensor, truth: Tensor, full_tensor: Tensor) -> float:
    """max|a-b| / max(1, max|b|); NaN counts as infinite."""
    if value.numel() == 0:
        return 0.0
    return _finite_or_infinite(float((value - truth).abs().max()) / max(1.0, float(full_tensor.abs().max())))


def relative_error(value: Tensor, truth: Tensor, full_tensor: Tensor, floor: float) -> float:
    """norm(a-b) / norm(b), with the norm of b at least `floor`; NaN counts as infinite."""
    difference = float(torch.linalg.vector_norm(value - truth)) if value.numel() else 0.0
    size = max(float(torch.linalg.vector_norm(full_tensor)), floor)
    return _finite_or_infinite(difference / size if size else difference)


def _finite_or_infinite(error: float) -> float:
    return error if error == error else float("inf")
