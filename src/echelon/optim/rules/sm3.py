"""SM3-II (Anil, Gupta, Koren and Singer 2019, "Memory-Efficient Adaptive Optimization", section 3).

Statistics of an element's row and column bound its second moment:

    v(i, j) = min(r(i), c(j)) + g(i, j)^2
    w = w - lr g / sqrt(v) - lr decay w           0 where v is 0
    r(i) = max over j of v(i, j)                  c(j) = max over i of v(i, j)

A vector's elements are each a row of their own: v itself is kept, as in Adagrad. With momentum, w moves by a running
mean of g / sqrt(v): one more value per element. Weight decay is not part of the paper.

Bounds never decrease, as in Adagrad, so warm-up and a large lr (0.1) suit it. One all-reduce per step takes the maxima.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, element_state, row_column_states
from echelon.optim.param_shards import ParamShard, matrix_tiles, state_rectangle
from echelon.optim.reduced_stats import RowColumnStats
from echelon.optim.update_rule import UpdateRule, resolve_momentum


class SM3(ShardedOptimizer):
    """SM3-II with row and column bounds all-reduced over the ranks that share a matrix."""

    def __init__(self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device):
        self._momentum = resolve_momentum(rule)
        self._shards = shards
        self._factored = [shard for shard in shards if shard.stack.is_factored]
        self._stats = RowColumnStats(self._factored, device)
        self._bounds = self._stats.zeros()
        """r and c of all matrices"""
        self._second_moments: dict[ParamShard, Tensor] = {}
        self._momentum_buffers: dict[ParamShard, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        largest = self._stats.zeros()
        for shard in self._shards:
            update = self._update_triton if shard.stack.is_factored and shard.use_triton else self._update_plain
            for rectangle in shard.rectangles:
                maxima = update(shard, rectangle, lr * shard.lr_factor, grad_scale, do_update)
                if shard.stack.is_factored and maxima[0].numel() and maxima[1].numel():
                    for stats, new in zip(self._stats.of_rectangle(largest, shard, rectangle), maxima, strict=True):
                        torch.maximum(stats, new, out=stats)
        self._stats.all_reduce(largest, op="max")
        self._bounds.copy_(torch.where(do_update, largest, self._bounds))

    def _update_triton(
        self, shard: ParamShard, rectangle: MatrixRectangle, lr: float, grad_scale: Tensor, do_update: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update a rectangle with Triton; return the maximum v of its rows and of its columns."""
        moment = self._momentum_buffers[shard][rectangle.elements] if self._momentum else None
        tiles = matrix_tiles(shard, rectangle, grad_scale)
        args = (*self._stats.of_rectangle(self._bounds, shard, rectangle), do_update)
        return tiles.sm3_update(*args, lr=lr, decay=shard.weight_decay, moment=moment, momentum=self._momentum)

    def _update_plain(
        self, shard: ParamShard, rectangle: MatrixRectangle, lr: float, grad_scale: Tensor, do_update: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update a rectangle in plain torch; the maxima are empty for vectors, which keep v itself."""
        g = shard.scaled_gradient(rectangle, grad_scale)
        v = self._second_moment(shard, rectangle, g)
        self._apply(shard, rectangle, torch.where(v > 0, g * v.rsqrt(), 0.0), lr, do_update)
        if not shard.stack.is_factored:
            state = state_rectangle(self._second_moments[shard], rectangle)
            state.copy_(torch.where(do_update, v, state))
            return v[:0, 0], v[0, :0]
        unpadded = v[rectangle.unpadded]
        return (unpadded.amax(1), unpadded.amax(0)) if unpadded.numel() else (unpadded[:0, 0], unpadded[0, :0])

    def _second_moment(self, shard: ParamShard, rectangle: MatrixRectangle, g: Tensor) -> Tensor:
        """Return v; padding is 0."""
        if not shard.stack.is_factored:
            return state_rectangle(self._second_moments[shard], rectangle) + g.square()
        v = torch.zeros_like(g)
        rows, columns = self._stats.of_rectangle(self._bounds, shard, rectangle)
        v[rectangle.unpadded] = torch.minimum(rows[:, None], columns) + g[rectangle.unpadded].square()
        return v

    def _apply(
        self, shard: ParamShard, rectangle: MatrixRectangle, direction: Tensor, lr: float, do_update: Tensor
    ) -> None:
        before = shard.read_rectangle(rectangle)
        if self._momentum:
            moment = state_rectangle(self._momentum_buffers[shard], rectangle)
            direction = moment * self._momentum + direction * (1 - self._momentum)
            moment.copy_(torch.where(do_update, direction, moment))
        after = before - (direction + before * shard.weight_decay) * lr
        shard.write_rectangle(rectangle, torch.where(do_update, after, before))

    def _init_state(self) -> None:
        if not self._second_moments and not self._momentum_buffers:
            self._second_moments = {shard: shard.zeros() for shard in self._shards if not shard.stack.is_factored}
            self._momentum_buffers = {shard: shard.zeros() for shard in self._shards} if self._momentum else {}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from row_column_states(self._stats, self._factored, self._bounds)
        for name, states in (("square", self._second_moments), ("momentum", self._momentum_buffers)):
            yield from (element_state(name, shard.param_group, shard.piece, state) for shard, state in states.items())

    def states(self) -> list[Tensor]:
        return [self._bounds, *self._second_moments.values(), *self._momentum_buffers.values()]

    def collectives(self) -> list[Collective]:
        return self._stats.collectives("maxima of rows and columns")
