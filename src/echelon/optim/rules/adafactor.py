"""Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4, 5).

For a matrix X [n, m] with gradient G, at step t:

    rho = lr                                      the schedule's (the paper's own is min(0.01, 1/sqrt(t)))
    a = max(eps2, RMS(X)) rho                     a step relative to the size of the weights
    b = 1 - t^-0.8
    R = b R + (1 - b) (G^2 + eps1) 1_m / m        means over rows,
    C = b C + (1 - b) 1_n^T (G^2 + eps1) / n      and over columns
    V = R C / mean(R)                             never made: U is
    U = G / sqrt(V)
    U = U / max(1, RMS(U) / d)
    X = X - a U - lr decay X

with eps1 = 1e-30, eps2 = 1e-3 and d = 1. Vectors keep V itself. With momentum, X moves by a running mean of a U, one
number an element more. RMS is of each matrix of a stack. Weight decay is no part of the paper.

A rank has a part of the matrix. Two messages a step, each of all parameters together: sums of squares over rows and
columns, with the squares of X, and then the squares of U.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_state import OptimizerState, element_state, row_column_states, shard_counts
from echelon.optim.param_shards import ParamShard, matrix_tiles, state_rectangle
from echelon.optim.reduced_stats import ReducedStats, RowColumnStats
from echelon.optim.update_rule import UpdateRule, resolve_momentum

EPS1, EPS2, CLIP_THRESHOLD, DECAY_EXPONENT = 1e-30, 1e-3, 1.0, 0.8


class Adafactor:
    def __init__(self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device):
        self._momentum = resolve_momentum(rule)
        self._factored = [one for one in shards if one.stack.is_factored]
        self._unfactored = [one for one in shards if not one.stack.is_factored]
        self._shards = [*self._factored, *self._unfactored]
        self._sum_stats = ReducedStats(
            self._shards,
            [
                (one.stack.num_row_column_stats if one.stack.is_factored else 0) + one.stack.num_matrices
                for one in self._shards
            ],
        )
        self._row_column_stats = RowColumnStats(self._factored)
        self._size_stats = ReducedStats(self._shards, [one.stack.num_matrices for one in self._shards])
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._means = self._row_column_stats.stats.zeros()
        """R and C of all matrices"""
        self._exp_avg_sq: dict[ParamShard, Tensor] = {}
        self._momentum_buffers: dict[ParamShard, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._step += do_update
        self._init_state()
        b = 1.0 - self._step.double() ** -DECAY_EXPONENT
        sums = self._sum_stats.all_reduce(self._local_sums(grad_scale))
        sizes = self._update_means(sums, b, grad_scale, do_update)
        squares = self._size_stats.zeros()
        for one in self._shards:
            mine = self._size_stats.view(squares, one)
            for part in one.rectangles if one.piece.counts_in_stage else ():
                mine[part.matrix_index] += self._update_sum_squares(one, part, grad_scale)
        self._size_stats.all_reduce(squares)
        for one in self._shards:
            elements = one.stack.rows * one.stack.columns
            rms = (self._size_stats.view(squares, one) / elements).sqrt()
            weights = (self._size_stats.view(sizes, one) / elements).sqrt().clamp(min=EPS2)
            factor = weights * (lr * one.lr_factor) / (rms / CLIP_THRESHOLD).clamp(min=1.0)
            for part in one.rectangles:
                self._apply(one, part, factor[part.matrix_index], lr * one.lr_factor, grad_scale, do_update)

    def _local_sums(self, scale: Tensor) -> Tensor:
        """What this rank's parts give: squares of rows, of columns, of weights."""
        sums = self._sum_stats.zeros()
        for one in self._shards:
            mine, stack = self._sum_stats.view(sums, one), one.stack
            for part in one.rectangles if one.piece.counts_in_stage else ():
                size = mine[mine.numel() - stack.num_matrices + part.matrix_index]
                if not stack.is_factored:
                    size += one.read_rectangle(part)[part.unpadded].square().sum()
                    continue
                rows = mine[: stack.num_matrices * stack.rows].view(stack.num_matrices, stack.rows)
                columns = mine[stack.num_matrices * stack.rows : stack.num_row_column_stats].view(
                    stack.num_matrices, stack.columns
                )
                of_rows, of_columns, of_weights = self._rectangle_sums(one, part, scale)
                rows[part.matrix_index, slice(*part.rows)] += of_rows
                columns[part.matrix_index, slice(*part.columns)] += of_columns
                size += of_weights
        return sums

    def _rectangle_sums(self, one: ParamShard, part: MatrixRectangle, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if one.use_triton:
            return matrix_tiles(one, part, scale).gradient_sums()
        squares = one.scaled_gradient(part, scale)[part.unpadded].square()
        return squares.sum(1), squares.sum(0), one.read_rectangle(part)[part.unpadded].square().sum()

    def _update_sum_squares(self, one: ParamShard, part: MatrixRectangle, scale: Tensor) -> Tensor:
        """The squares of U, before it is made smaller."""
        if one.stack.is_factored and one.use_triton:
            return matrix_tiles(one, part, scale).update_sum_squares(*self._rsqrt_factors(one, part))
        return self._update_direction(one, part, scale)[part.unpadded].square().sum()

    def _update_means(self, sums: Tensor, b: Tensor, scale: Tensor, live: Tensor) -> Tensor:
        """The new means; gives the squares of the weights."""
        sizes = self._size_stats.zeros()
        for one in self._shards:
            mine, stack = self._sum_stats.view(sums, one), one.stack
            self._size_stats.view(sizes, one).copy_(mine[mine.numel() - stack.num_matrices :])
            if stack.is_factored:
                split = stack.num_matrices * stack.rows
                found = (
                    torch.cat([mine[:split] / stack.columns, mine[split : stack.num_row_column_stats] / stack.rows])
                    + EPS1
                )
                _update_mean(self._row_column_stats.stats.view(self._means, one), found, b, live)
        for one, square in self._exp_avg_sq.items():
            for part in one.rectangles:
                _update_mean(state_rectangle(square, part), one.scaled_gradient(part, scale).square() + EPS1, b, live)
        return sizes

    def _update_direction(self, one: ParamShard, part: MatrixRectangle, scale: Tensor) -> Tensor:
        """U, before it is made smaller; padding is 0."""
        g = one.scaled_gradient(part, scale)
        if not one.stack.is_factored:
            return g * state_rectangle(self._exp_avg_sq[one], part).clamp(min=EPS1).rsqrt()
        rows, columns = self._rsqrt_factors(one, part)
        real = g[part.unpadded]
        real *= rows[:, None] * columns
        return g

    def _rsqrt_factors(self, one: ParamShard, part: MatrixRectangle) -> tuple[Tensor, Tensor]:
        """1 / sqrt(V), as a number of each row and one of each column."""
        rows = self._row_column_stats.rows(self._means, one)[part.matrix_index]
        columns = self._row_column_stats.columns(self._means, one)[part.matrix_index]
        # Roots first: the product of two numbers around eps1 would be 0.
        return (rows[slice(*part.rows)] / rows.mean()).rsqrt(), columns[slice(*part.columns)].rsqrt()

    def _apply(
        self, one: ParamShard, part: MatrixRectangle, factor: Tensor, lr: float, scale: Tensor, live: Tensor
    ) -> None:
        if one.stack.is_factored and one.use_triton:
            moment = self._momentum_buffers[one][part.start : part.stop] if self._momentum else None
            matrix_tiles(one, part, scale).adafactor_update(
                *(*self._rsqrt_factors(one, part), factor, live),
                decay=lr * one.weight_decay,
                moment=moment,
                momentum=self._momentum,
            )
            return
        before, towards = one.read_rectangle(part), self._update_direction(one, part, scale) * factor
        if self._momentum:
            moment = state_rectangle(self._momentum_buffers[one], part)
            towards = moment * self._momentum + towards * (1 - self._momentum)
            moment.copy_(torch.where(live, towards, moment))
        one.write_rectangle(part, torch.where(live, before - towards - before * (lr * one.weight_decay), before))

    def _init_state(self) -> None:
        if not self._exp_avg_sq and not self._momentum_buffers:
            self._exp_avg_sq = {one: one.zeros() for one in self._unfactored}
            self._momentum_buffers = {one: one.zeros() for one in self._shards} if self._momentum else {}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from shard_counts("step", self._shards, self._step)
        yield from row_column_states(self._row_column_stats, self._factored, self._means)
        for kind, states in (("square", self._exp_avg_sq), ("momentum", self._momentum_buffers)):
            yield from (element_state(kind, one.param_group, one.piece, state) for one, state in states.items())

    def states(self) -> list[Tensor]:
        return [self._step, self._means, *self._exp_avg_sq.values(), *self._momentum_buffers.values()]

    def collectives(self) -> list[Collective]:
        return [
            *self._sum_stats.collectives("squares of rows and columns"),
            *self._size_stats.collectives("size of the update"),
        ]


def _update_mean(mean: Tensor, found: Tensor, b: Tensor, live: Tensor) -> None:
    b = b.to(mean.dtype)
    mean.copy_(torch.where(live, mean * b + found * (1 - b), mean))
