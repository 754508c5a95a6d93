"""One rank of a comparison: run the layout, and compare every local piece with the truth.

[Note: equal gradients]

A layout's gradients are compared with the truth's when they are complete, and then replaced by them. So the update
rules start from equal gradients. Without this, rules that take a sign or divide by a root would turn rounding errors
into differences of a learning rate, wherever a gradient is zero but for rounding (a key's bias, for example). Nothing
is missed: each gradient of each step is compared, and so is each weight that an update makes of them.

As configured, in few bits, the weights are replaced as well after they are compared: errors of one step do not become
those of the next. What each error may be is in as_configured.py.
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
from echelon.training.engine_options import DTYPES, loss_scale_settings, parallel_options
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
    """norm of a-b over the rank's elements, divided by that of b over the full tensor, or of its updates"""


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
    with safe_open(truth, framework="pt") as record:
        # An asynchronous update may turn the rounding of a gradient that is zero into a share of the learning rate.
        floor = max(PARAMETER_FLOOR, case.optimizer.lr) if asynchronous else PARAMETER_FLOOR
        comparison = _Comparison(engine, TruthRecord(record, case, floor=floor))
        gradients = None if asynchronous else ComparedGradients(comparison)
        for step in range(case.steps):
            comparison.truth.step = step
            result = engine.step(case.batch(step, layout.batch), lr=case.learning_rate(step))
            comparison.scalars(result, ("loss",) if gradients is None else ("loss", "norm"))
            if gradients is not None:
                engine.drain()
                comparison.parameters()
            if not case.is_float64:
                comparison.replace_parameters()
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
    return RankReport(tuple(comparison.differences), owned, sizes, engine.param_names, engine.parallel.axes.dropped_any)


def build_engine(case: VerifyCase, layout: Layout, leave_out: str = "") -> Engine:
    """The engine of a run with the case's configuration."""
    device = torch.device("cuda", torch.cuda.current_device()) if case.config.device == "cuda" else torch.device("cpu")
    options = replace(parallel_options(case.config, device), drop_collective=leave_out)
    if options.host_share is None:  # a GPU has room for all states of a reduced model: none would be offloaded
        options = replace(options, host_share=1.0)
    if not case.config.memory.disk:
        options = replace(options, disk_dir="")
    scale = loss_scale_settings(case.config)
    model = case.build("meta", double=case.is_float64)
    inputs = case.batch(0, layout.batch) if case.batch_function else None
    engine = Engine(model, layout, case.optimizer, clip=case.clip, options=options, loss_scale=scale, inputs=inputs)
    engine.model.train()
    return engine


class TruthRecord:
    """The truth's record of one step, and how far values are from it."""

    def __init__(self, record: safe_open, case: VerifyCase, step: int = 0, *, floor: float = PARAMETER_FLOOR):
        """`floor`: see PARAMETER_FLOOR; larger where gradients are not replaced by the truth's."""
        self._record, self._case, self.step, self._parameter_floor = record, case, step, floor
        self._last_read: tuple[str, Tensor] = ("", torch.empty(0))
        """most tensors are asked for several times in a row"""

    def tensor(self, kind: str, name: str = "") -> Tensor:
        key = f"{self.step}/{kind}/{name}" if name else f"{self.step}/{kind}"
        if key != self._last_read[0]:
            self._last_read = (key, self._record.get_tensor(key))
        return self._last_read[1]

    def piece(self, kind: str, piece: Piece) -> Tensor:
        return expected_piece(self.tensor(kind, piece.param.name), piece)

    def difference(self, kind: str, name: str, local: Tensor, piece: Piece | None = None) -> Difference:
        """Compare values with the truth's, or a piece with a piece of them."""
        full, local = self.tensor(kind, name), local.detach().to("cpu", torch.float64)
        expected = full if piece is None else self.piece(kind, piece)
        error, relative = absolute_error(local, expected, full), relative_error(local, expected, self.size(kind, name))
        return Difference(self.step, kind, name, error, relative)

    def size(self, kind: str, name: str) -> float:
        """Return what errors are relative to: the norm of a tensor, or of its update as configured."""
        full = self.tensor(kind, name)
        size = max(float(torch.linalg.vector_norm(full)), self._floor(kind, full))
        if not self._case.is_float64 and kind in ("parameter", "average"):
            before: Tensor = self._record.get_tensor(f"{self.step - 1}/{kind}/{name}")
            size = float(torch.linalg.vector_norm(full - before)) or size
        return size

    def _floor(self, kind: str, full: Tensor) -> float:
        """The norm below which a tensor is zero but for rounding."""
        if kind == "gradient":
            config = self._case.config
            share = GRADIENT_FLOOR if self._case.is_float64 else torch.finfo(DTYPES[config.dtype]).eps / 2
            return float(share * float(self.tensor("norm")))
        if kind not in ("parameter", "average", "buffer"):
            return 0.0
        return float(self._parameter_floor * full.numel() ** 0.5)


class _Comparison:
    """Compares what an engine holds with the truth."""

    def __init__(self, engine: Engine, truth: TruthRecord):
        self.engine, self.truth = engine, truth
        self.differences: list[Difference] = []

    def scalars(self, result: StepResult, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self.differences.append(
                self.truth.difference(kind, "", torch.tensor(getattr(result, kind), dtype=torch.float64))
            )

    def parameters(self) -> None:
        """Compare weights, their moving average and buffers."""
        sharded_model = self.engine.parallel.sharded_model
        for group, piece in sharded_model.pieces():
            self.piece("parameter", piece, sharded_model.piece_view(group.master.values(), piece))
        for state in self.engine.ema.named_states() if self.engine.ema is not None else ():
            self.piece("average", state.piece, state.read())
        for name, buffer in self.engine.model.named_buffers():
            self.differences.append(self.truth.difference("buffer", name, buffer))

    def replace_parameters(self) -> None:
        """Give the engine the truth's weights."""
        sharded_model = self.engine.parallel.sharded_model
        for group, piece in sharded_model.pieces():
            group.master.set_values(piece.shard_offset, self.truth.piece("parameter", piece).float())
        sharded_model.after_update()

    def piece(self, kind: str, piece: Piece, local: Tensor) -> None:
        self.differences.append(self.truth.difference(kind, piece.param.name, local, piece))


class ComparedGradients:
    """Stands in for `Engine.partial_gradients`, after which gradients are complete: see [Note: equal gradients]."""

    def __init__(self, comparison: _Comparison):
        self._comparison, engine = comparison, comparison.engine
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
                self._comparison.piece("gradient", piece, local.double() * scale)
                local.copy_(self._comparison.truth.piece("gradient", piece) / scale)


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


def relative_error(value: Tensor, truth: Tensor, size: float) -> float:
    """norm(a-b) / size; NaN counts as infinite."""
    difference = float(torch.linalg.vector_norm(value - truth)) if value.numel() else 0.0
    return _finite_or_infinite(difference / size if size else difference)


def _finite_or_infinite(error: float) -> float:
    return error if error == error else float("inf")
