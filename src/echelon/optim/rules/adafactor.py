"""Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4, 5).

For a matrix X [n, m] with gradient G, at step t:

    rho = lr                                      from the schedule (the paper's own is min(0.01, 1/sqrt(t)))
    a = max(eps2, RMS(X)) rho                     a step relative to the size of the weights
    b = 1 - t^-0.8
    R = b R + (1 - b) (G^2 + eps1) 1_m / m        means over rows,
    C = b C + (1 - b) 1_n^T (G^2 + eps1) / n      and over columns
    V = R C / mean(R)                             never materialised
    U = G / sqrt(V)
    U = U / max(1, RMS(U) / d)
    X = X - a U - lr decay X

with eps1 = 1e-30, eps2 = 1e-3 and d = 1. Vectors keep V itself. With momentum, X moves by a running mean of a U: one
more value per element. RMS is of each matrix of a stack. Weight decay is not part of the paper.

A rank has a part of the matrix. A step takes two all-reduces, each of all parameters together: sums of squares over
rows and columns with the squares of X, and then the squares of U.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, element_state, row_column_states, shard_counts
from echelon.optim.param_shards import ParamShard, matrix_tiles, state_rectangle
from echelon.optim.reduced_stats import ReducedStats, RowColumnStats
from echelon.optim.update_rule import UpdateRule, resolve_momentum

EPS1, EPS2, CLIP_THRESHOLD, DECAY_EXPONENT = 1e-30, 1e-3, 1.0, 0.8


class Adafactor(ShardedOptimizer):
    """Adafactor with row and column statistics all-reduced over the ranks that share a matrix."""

    def __init__(self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device):
        self._momentum = resolve_momentum(rule)
        self._factored = [shard for shard in shards if shard.stack.is_factored]
        self._unfactored = [shard for shard in shards if not shard.stack.is_factored]
        self._shards = [*self._factored, *self._unfactored]
        sum_sizes = [
            shard.stack.num_matrices + (shard.stack.num_row_column_stats if shard.stack.is_factored else 0)
            for shard in self._shards
        ]
        self._sum_stats = ReducedStats(self._shards, sum_sizes, device)
        """of each matrix: row sums and column sums where it is factored, then the sum of squares of the weights"""
        self._row_column_stats = RowColumnStats(self._factored, device)
        self._size_stats = ReducedStats(self._shards, [shard.stack.num_matrices for shard in self._shards], device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._means = self._row_column_stats.zeros()
        """R and C of all matrices"""
        self._exp_avg_sq: dict[ParamShard, Tensor] = {}
        self._momentum_buffers: dict[ParamShard, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._step += do_update
        self._init_state()
        b = 1.0 - self._step.double() ** -DECAY_EXPONENT
        sums = self._sum_stats.all_reduce(self._local_sums(grad_scale))
        self._update_means(sums, b, grad_scale, do_update)
        squares = self._size_stats.zeros()
        for shard in self._shards:
            stats = self._size_stats.view(squares, shard)
            for rectangle in shard.rectangles if shard.piece.counts_in_stage else ():
                stats[rectangle.matrix_index] += self._update_sum_squares(shard, rectangle, grad_scale)
        self._size_stats.all_reduce(squares)
        for shard in self._shards:
            elements = shard.stack.rows * shard.stack.columns
            rms = (self._size_stats.view(squares, shard) / elements).sqrt()
            weight_squares = self._sum_stats.view(sums, shard)[-shard.stack.num_matrices :]
            weights = (weight_squares / elements).sqrt().clamp(min=EPS2)
            shard_lr = lr * shard.lr_factor
            factor = weights * shard_lr / (rms / CLIP_THRESHOLD).clamp(min=1.0)
            for rectangle in shard.rectangles:
                self._apply(shard, rectangle, factor[rectangle.matrix_index], shard_lr, grad_scale, do_update)

    def _local_sums(self, grad_scale: Tensor) -> Tensor:
        """Return this rank's partial sums: squares over rows, over columns, and of weights."""
        sums = self._sum_stats.zeros()
        for shard in self._shards:
            stats, stack = self._sum_stats.view(sums, shard), shard.stack
            for rectangle in shard.rectangles if shard.piece.counts_in_stage else ():
                size = stats[stats.numel() - stack.num_matrices + rectangle.matrix_index]
                if not stack.is_factored:
                    size += shard.read_rectangle(rectangle)[rectangle.unpadded].square().sum()
                    continue
                num_rows = stack.num_matrices * stack.rows
                rows = stats[:num_rows].view(-1, stack.rows)
                columns = stats[num_rows : stack.num_row_column_stats].view(-1, stack.columns)
                row_sums, column_sums, weight_sum = self._rectangle_sums(shard, rectangle, grad_scale)
                rows[rectangle.matrix_index, slice(*rectangle.rows)] += row_sums
                columns[rectangle.matrix_index, slice(*rectangle.columns)] += column_sums
                size += weight_sum
        return sums

    def _rectangle_sums(
        self, shard: ParamShard, rectangle: MatrixRectangle, grad_scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if shard.use_triton:
            return matrix_tiles(shard, rectangle, grad_scale).gradient_sums()
        squares = shard.scaled_gradient(rectangle, grad_scale)[rectangle.unpadded].square()
        return squares.sum(1), squares.sum(0), shard.read_rectangle(rectangle)[rectangle.unpadded].square().sum()

    def _update_sum_squares(self, shard: ParamShard, rectangle: MatrixRectangle, grad_scale: Tensor) -> Tensor:
        """Return the sum of squares of U before clipping."""
        if shard.stack.is_factored and shard.use_triton:
            return matrix_tiles(shard, rectangle, grad_scale).update_sum_squares(*self._rsqrt_factors(shard, rectangle))
        return self._update_direction(shard, rectangle, grad_scale)[rectangle.unpadded].square().sum()

    def _update_means(self, sums: Tensor, b: Tensor, grad_scale: Tensor, do_update: Tensor) -> None:
        for shard in self._factored:
            stats, stack = self._sum_stats.view(sums, shard), shard.stack
            num_rows = stack.num_matrices * stack.rows
            row_sums, column_sums = stats[:num_rows], stats[num_rows : stack.num_row_column_stats]
            new_mean = torch.cat([row_sums / stack.columns, column_sums / stack.rows]) + EPS1
            _update_mean(self._row_column_stats.view(self._means, shard), new_mean, b, do_update)
        for shard, square in self._exp_avg_sq.items():
            for rectangle in shard.rectangles:
                new_mean = shard.scaled_gradient(rectangle, grad_scale).square() + EPS1
                _update_mean(state_rectangle(square, rectangle), new_mean, b, do_update)

    def _update_direction(self, shard: ParamShard, rectangle: MatrixRectangle, grad_scale: Tensor) -> Tensor:
        """Return U before clipping; padding is 0."""
        g = shard.scaled_gradient(rectangle, grad_scale)
        if not shard.stack.is_factored:
            return g * state_rectangle(self._exp_avg_sq[shard], rectangle).clamp(min=EPS1).rsqrt()
        rows, columns = self._rsqrt_factors(shard, rectangle)
        unpadded = g[rectangle.unpadded]
        unpadded *= rows[:, None] * columns
        return g

    def _rsqrt_factors(self, shard: ParamShard, rectangle: MatrixRectangle) -> tuple[Tensor, Tensor]:
        """Return 1 / sqrt(V) as a factor per row and a factor per column."""
        row_mean = self._row_column_stats.rows_and_columns(self._means, shard)[0][rectangle.matrix_index].mean()
        rows, columns = self._row_column_stats.of_rectangle(self._means, shard, rectangle)
        # Roots first: multiplying two values around eps1 would underflow to 0.
        return (rows / row_mean).rsqrt(), columns.rsqrt()

    def _apply(
        self,
        shard: ParamShard,
        rectangle: MatrixRectangle,
        factor: Tensor,
        lr: float,
        grad_scale: Tensor,
        do_update: Tensor,
    ) -> None:
        if shard.stack.is_factored and shard.use_triton:
            moment = self._momentum_buffers[shard][rectangle.elements] if self._momentum else None
            args = (*self._rsqrt_factors(shard, rectangle), factor, do_update)
            tiles, decay = matrix_tiles(shard, rectangle, grad_scale), lr * shard.weight_decay
            tiles.adafactor_update(*args, decay=decay, moment=moment, momentum=self._momentum)
            return
        before = shard.read_rectangle(rectangle)
        direction = self._update_direction(shard, rectangle, grad_scale) * factor
        if self._momentum:
            moment = state_rectangle(self._momentum_buffers[shard], rectangle)
            direction = moment * self._momentum + direction * (1 - self._momentum)
            moment.copy_(torch.where(do_update, direction, moment))
        after = before - direction - before * (lr * shard.weight_decay)
        shard.write_rectangle(rectangle, torch.where(do_update, after, before))

    def _init_state(self) -> None:
        if not self._exp_avg_sq and not self._momentum_buffers:
            self._exp_avg_sq = {shard: shard.zeros() for shard in self._unfactored}
            self._momentum_buffers = {shard: shard.zeros() for shard in self._shards} if self._momentum else {}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from shard_counts("step", self._shards, self._step)
        yield from row_column_states(self._row_column_stats, self._factored, self._means)
        for name, states in (("square", self._exp_avg_sq), ("momentum", self._momentum_buffers)):
            yield from (element_state(name, shard.param_group, shard.piece, state) for shard, state in states.items())

    def states(self) -> list[Tensor]:
        return [self._step, self._means, *self._exp_avg_sq.values(), *self._momentum_buffers.values()]

    def collectives(self) -> list[Collective]:
        return [
            *self._sum_stats.collectives("squares of rows and columns"),
            *self._size_stats.collectives("size of the update"),
        ]


def _update_mean(mean: Tensor, new_mean: Tensor, b: Tensor, do_update: Tensor) -> None:
    b = b.to(mean.dtype)
    mean.copy_(torch.where(do_update, mean * b + new_mean * (1 - b), mean))
