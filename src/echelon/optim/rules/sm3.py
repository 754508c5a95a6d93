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
from echelon.optim.matrix_shards import Rectangle
from echelon.optim.optimizer_state import Kept, elements, of_sides
from echelon.optim.param_shards import Held, of, tiles_of
from echelon.optim.reduced_stats import Sides
from echelon.optim.update_rule import Rule, momentum_of


class SM3:
    def __init__(self, held: Sequence[Held], rule: Rule):
        self._momentum = momentum_of(rule)
        self._held = held
        self._factored = [one for one in held if one.stack.factored]
        self._sides = Sides(self._factored)
        self._bounds = self._sides.shared.zeros()
        """r and c of all matrices"""
        self._squares: dict[Held, Tensor] = {}
        self._moments: dict[Held, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._begin()
        largest = self._sides.shared.zeros()
        for one in self._held:
            for part in one.parts:
                if one.stack.factored and one.has_kernels:
                    found = self._with_a_kernel(one, part, lr * one.lr, scale, live)
                else:
                    found = self._update(one, part, lr * one.lr, scale, live)
                if one.stack.factored and found[0].numel() and found[1].numel():
                    rows = self._sides.rows(largest, one)[part.matrix, slice(*part.rows)]
                    columns = self._sides.columns(largest, one)[part.matrix, slice(*part.columns)]
                    torch.maximum(rows, found[0], out=rows)
                    torch.maximum(columns, found[1], out=columns)
        self._sides.shared.combine(largest, op="max")
        self._bounds.copy_(torch.where(live, largest, self._bounds))

    def _with_a_kernel(
        self, one: Held, part: Rectangle, lr: float, scale: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The largest v of rows, and of columns."""
        moment = self._moments[one][part.start : part.stop] if self._momentum else None
        return tiles_of(one, part, scale).bounded(
            *(*self._bounds_of(one, part), live),
            lr=lr,
            decay=one.decay,
            moment=moment,
            momentum=self._momentum,
        )

    def _update(self, one: Held, part: Rectangle, lr: float, scale: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """The same in plain torch; nothing of what keeps v itself."""
        g = one.gradient(part, scale)
        v = self._second_moment(one, part, g)
        self._apply(one, part, torch.where(v > 0, g * v.rsqrt(), 0.0), lr, live)
        if not one.stack.factored:
            kept = of(self._squares[one], part)
            kept.copy_(torch.where(live, v, kept))
            return v[:0, 0], v[0, :0]
        real = v[part.real]
        return (real.amax(1), real.amax(0)) if real.numel() else (real[:0, 0], real[0, :0])

    def _second_moment(self, one: Held, part: Rectangle, g: Tensor) -> Tensor:
        """v, with padding 0."""
        if not one.stack.factored:
            return of(self._squares[one], part) + g.square()
        v = torch.zeros_like(g)
        rows, columns = self._bounds_of(one, part)
        v[part.real] = torch.minimum(rows[:, None], columns) + g[part.real].square()
        return v

    def _bounds_of(self, one: Held, part: Rectangle) -> tuple[Tensor, Tensor]:
        rows = self._sides.rows(self._bounds, one)[part.matrix, slice(*part.rows)]
        columns = self._sides.columns(self._bounds, one)[part.matrix, slice(*part.columns)]
        return rows, columns

    def _apply(self, one: Held, part: Rectangle, towards: Tensor, lr: float, live: Tensor) -> None:
        before = one.values(part)
        if self._momentum:
            moment = of(self._moments[one], part)
            towards = moment * self._momentum + towards * (1 - self._momentum)
            moment.copy_(torch.where(live, towards, moment))
        one.set(part, torch.where(live, before - (towards + before * one.decay) * lr, before))

    def _begin(self) -> None:
        if not self._squares and not self._moments:
            self._squares = {one: one.zeros() for one in self._held if not one.stack.factored}
            self._moments = {one: one.zeros() for one in self._held} if self._momentum else {}

    def kept(self) -> Iterator[Kept]:
        self._begin()
        yield from of_sides(self._sides, self._factored, self._bounds)
        for kind, states in (("square", self._squares), ("momentum", self._moments)):
            yield from (elements(kind, one.unit, one.piece, state) for one, state in states.items())

    def states(self) -> list[Tensor]:
        return [self._bounds, *self._squares.values(), *self._moments.values()]

    def collectives(self) -> list[Collective]:
        return self._sides.shared.collectives("maxima of rows and columns")
