"""SM3-II (Anil, Gupta, Koren and Singer 2019, "Memory-Efficient Adaptive Optimization", section 3).

The second moment of an element is bounded by what is kept of its row and of its column:

    v(i, j) = min(r(i), c(j)) + g(i, j)^2
    w = w - lr g / sqrt(v) - lr decay w           0 where v is 0
    r(i) = max over j of v(i, j)                  c(j) = max over i of v(i, j)

A vector's elements are each a row of their own: v itself is kept, as in Adagrad. With momentum, w moves by a running
mean of g / sqrt(v), one number an element more. Weight decay is no part of the paper.

Nothing ever falls, as in Adagrad, so a warm-up and a large lr (0.1) suit it. One message a step takes the maxima.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_state import OptimizerState, element_state, row_column_states
from echelon.optim.param_shards import ParamShard, matrix_tiles, state_rectangle
from echelon.optim.reduced_stats import RowColumnStats
from echelon.optim.update_rule import UpdateRule, resolve_momentum


class SM3:
    def __init__(self, shards: Sequence[ParamShard], rule: UpdateRule):
        self._momentum = resolve_momentum(rule)
        self._shards = shards
        self._factored = [one for one in shards if one.stack.is_factored]
        self._stats = RowColumnStats(self._factored)
        self._bounds = self._stats.stats.zeros()
        """r and c of all matrices"""
        self._second_moments: dict[ParamShard, Tensor] = {}
        self._momentum_buffers: dict[ParamShard, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        largest = self._stats.stats.zeros()
        for one in self._shards:
            for part in one.rectangles:
                if one.stack.is_factored and one.use_triton:
                    found = self._update_triton(one, part, lr * one.lr_factor, grad_scale, do_update)
                else:
                    found = self._update_plain(one, part, lr * one.lr_factor, grad_scale, do_update)
                if one.stack.is_factored and found[0].numel() and found[1].numel():
                    rows = self._stats.rows(largest, one)[part.matrix_index, slice(*part.rows)]
                    columns = self._stats.columns(largest, one)[part.matrix_index, slice(*part.columns)]
                    torch.maximum(rows, found[0], out=rows)
                    torch.maximum(columns, found[1], out=columns)
        self._stats.stats.all_reduce(largest, op="max")
        self._bounds.copy_(torch.where(do_update, largest, self._bounds))

    def _update_triton(
        self, one: ParamShard, part: MatrixRectangle, lr: float, scale: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The largest v of rows, and of columns."""
        moment = self._momentum_buffers[one][part.start : part.stop] if self._momentum else None
        return matrix_tiles(one, part, scale).sm3_update(
            *(*self._bounds_of(one, part), live),
            lr=lr,
            decay=one.weight_decay,
            moment=moment,
            momentum=self._momentum,
        )

    def _update_plain(
        self, one: ParamShard, part: MatrixRectangle, lr: float, scale: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same in plain torch; nothing of what keeps v itself."""
        g = one.scaled_gradient(part, scale)
        v = self._second_moment(one, part, g)
        self._apply(one, part, torch.where(v > 0, g * v.rsqrt(), 0.0), lr, live)
        if not one.stack.is_factored:
            kept = state_rectangle(self._second_moments[one], part)
            kept.copy_(torch.where(live, v, kept))
            return v[:0, 0], v[0, :0]
        real = v[part.unpadded]
        return (real.amax(1), real.amax(0)) if real.numel() else (real[:0, 0], real[0, :0])

    def _second_moment(self, one: ParamShard, part: MatrixRectangle, g: Tensor) -> Tensor:
        """v, with padding 0."""
        if not one.stack.is_factored:
            return state_rectangle(self._second_moments[one], part) + g.square()
        v = torch.zeros_like(g)
        rows, columns = self._bounds_of(one, part)
        v[part.unpadded] = torch.minimum(rows[:, None], columns) + g[part.unpadded].square()
        return v

    def _bounds_of(self, one: ParamShard, part: MatrixRectangle) -> tuple[Tensor, Tensor]:
        rows = self._stats.rows(self._bounds, one)[part.matrix_index, slice(*part.rows)]
        columns = self._stats.columns(self._bounds, one)[part.matrix_index, slice(*part.columns)]
        return rows, columns

    def _apply(self, one: ParamShard, part: MatrixRectangle, towards: Tensor, lr: float, live: Tensor) -> None:
        before = one.read_rectangle(part)
        if self._momentum:
            moment = state_rectangle(self._momentum_buffers[one], part)
            towards = moment * self._momentum + towards * (1 - self._momentum)
            moment.copy_(torch.where(live, towards, moment))
        one.write_rectangle(part, torch.where(live, before - (towards + before * one.weight_decay) * lr, before))

    def _init_state(self) -> None:
        if not self._second_moments and not self._momentum_buffers:
            self._second_moments = {one: one.zeros() for one in self._shards if not one.stack.is_factored}
            self._momentum_buffers = {one: one.zeros() for one in self._shards} if self._momentum else {}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from row_column_states(self._stats, self._factored, self._bounds)
        for kind, states in (("square", self._second_moments), ("momentum", self._momentum_buffers)):
            yield from (element_state(kind, one.param_group, one.piece, state) for one, state in states.items())

    def states(self) -> list[Tensor]:
        return [self._bounds, *self._second_moments.values(), *self._momentum_buffers.values()]

    def collectives(self) -> list[Collective]:
        return self._stats.stats.collectives("maxima of rows and columns")
