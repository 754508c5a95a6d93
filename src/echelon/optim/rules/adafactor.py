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
from echelon.optim.matrix_shards import Rectangle
from echelon.optim.optimizer_state import Kept, elements, number_of_held, of_sides
from echelon.optim.param_shards import Held, of, tiles_of
from echelon.optim.reduced_stats import Shared, Sides
from echelon.optim.update_rule import Rule, momentum_of

EPS1, EPS2, LIMIT, DECAY = 1e-30, 1e-3, 1.0, 0.8


class Adafactor:
    def __init__(self, held: Sequence[Held], rule: Rule, device: torch.device):
        self._momentum = momentum_of(rule)
        self._factored = [one for one in held if one.stack.factored]
        self._plain = [one for one in held if not one.stack.factored]
        self._held = [*self._factored, *self._plain]
        self._sums = Shared(
            self._held,
            [(one.stack.sides if one.stack.factored else 0) + one.stack.matrices for one in self._held],
        )
        self._sides = Sides(self._factored)
        self._sizes = Shared(self._held, [one.stack.matrices for one in self._held])
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._means = self._sides.shared.zeros()
        """R and C of all matrices"""
        self._squares: dict[Held, Tensor] = {}
        self._moments: dict[Held, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._step += live
        self._begin()
        b = 1.0 - self._step.double() ** -DECAY
        sums = self._sums.combine(self._local_sums(scale))
        sizes = self._take_in(sums, b, scale, live)
        squares = self._sizes.zeros()
        for one in self._held:
            mine = self._sizes.of(squares, one)
            for part in one.parts if one.piece.counts else ():
                mine[part.matrix] += self._size(one, part, scale)
        self._sizes.combine(squares)
        for one in self._held:
            elements = one.stack.rows * one.stack.columns
            rms = (self._sizes.of(squares, one) / elements).sqrt()
            weights = (self._sizes.of(sizes, one) / elements).sqrt().clamp(min=EPS2)
            factor = weights * (lr * one.lr) / (rms / LIMIT).clamp(min=1.0)
            for part in one.parts:
                self._apply(one, part, factor[part.matrix], lr * one.lr, scale, live)

    def _local_sums(self, scale: Tensor) -> Tensor:
        """What this rank's parts give: squares of rows, of columns, of weights."""
        sums = self._sums.zeros()
        for one in self._held:
            mine, stack = self._sums.of(sums, one), one.stack
            for part in one.parts if one.piece.counts else ():
                size = mine[mine.numel() - stack.matrices + part.matrix]
                if not stack.factored:
                    size += one.values(part)[part.real].square().sum()
                    continue
                rows = mine[: stack.matrices * stack.rows].view(stack.matrices, stack.rows)
                columns = mine[stack.matrices * stack.rows : stack.sides].view(stack.matrices, stack.columns)
                of_rows, of_columns, of_weights = self._sums_of(one, part, scale)
                rows[part.matrix, slice(*part.rows)] += of_rows
                columns[part.matrix, slice(*part.columns)] += of_columns
                size += of_weights
        return sums

    def _sums_of(self, one: Held, part: Rectangle, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if one.has_kernels:
            return tiles_of(one, part, scale).sums()
        squares = one.gradient(part, scale)[part.real].square()
        return squares.sum(1), squares.sum(0), one.values(part)[part.real].square().sum()

    def _size(self, one: Held, part: Rectangle, scale: Tensor) -> Tensor:
        """The squares of U, before it is made smaller."""
        if one.stack.factored and one.has_kernels:
            return tiles_of(one, part, scale).size(*self._roots(one, part))
        return self._towards(one, part, scale)[part.real].square().sum()

    def _take_in(self, sums: Tensor, b: Tensor, scale: Tensor, live: Tensor) -> Tensor:
        """The new means; gives the squares of the weights."""
        sizes = self._sizes.zeros()
        for one in self._held:
            mine, stack = self._sums.of(sums, one), one.stack
            self._sizes.of(sizes, one).copy_(mine[mine.numel() - stack.matrices :])
            if stack.factored:
                split = stack.matrices * stack.rows
                found = torch.cat([mine[:split] / stack.columns, mine[split : stack.sides] / stack.rows]) + EPS1
                _blend(self._sides.shared.of(self._means, one), found, b, live)
        for one, square in self._squares.items():
            for part in one.parts:
                _blend(of(square, part), one.gradient(part, scale).square() + EPS1, b, live)
        return sizes

    def _towards(self, one: Held, part: Rectangle, scale: Tensor) -> Tensor:
        """U, before it is made smaller; padding is 0."""
        g = one.gradient(part, scale)
        if not one.stack.factored:
            return g * of(self._squares[one], part).clamp(min=EPS1).rsqrt()
        rows, columns = self._roots(one, part)
        real = g[part.real]
        real *= rows[:, None] * columns
        return g

    def _roots(self, one: Held, part: Rectangle) -> tuple[Tensor, Tensor]:
        """1 / sqrt(V), as a number of each row and one of each column."""
        rows = self._sides.rows(self._means, one)[part.matrix]
        columns = self._sides.columns(self._means, one)[part.matrix]
        # Roots first: the product of two numbers around eps1 would be 0.
        return (rows[slice(*part.rows)] / rows.mean()).rsqrt(), columns[slice(*part.columns)].rsqrt()

    def _apply(self, one: Held, part: Rectangle, factor: Tensor, lr: float, scale: Tensor, live: Tensor) -> None:
        if one.stack.factored and one.has_kernels:
            moment = self._moments[one][part.start : part.stop] if self._momentum else None
            tiles_of(one, part, scale).move(
                *(*self._roots(one, part), factor, live),
                decay=lr * one.decay,
                moment=moment,
                momentum=self._momentum,
            )
            return
        before, towards = one.values(part), self._towards(one, part, scale) * factor
        if self._momentum:
            moment = of(self._moments[one], part)
            towards = moment * self._momentum + towards * (1 - self._momentum)
            moment.copy_(torch.where(live, towards, moment))
        one.set(part, torch.where(live, before - towards - before * (lr * one.decay), before))

    def _begin(self) -> None:
        if not self._squares and not self._moments:
            self._squares = {one: one.zeros() for one in self._plain}
            self._moments = {one: one.zeros() for one in self._held} if self._momentum else {}

    def kept(self) -> Iterator[Kept]:
        self._begin()
        yield from number_of_held("step", self._held, self._step)
        yield from of_sides(self._sides, self._factored, self._means)
        for kind, states in (("square", self._squares), ("momentum", self._moments)):
            yield from (elements(kind, one.unit, one.piece, state) for one, state in states.items())

    def states(self) -> list[Tensor]:
        return [self._step, self._means, *self._squares.values(), *self._moments.values()]

    def collectives(self) -> list[Collective]:
        return [*self._sums.collectives("squares of rows and columns"), *self._sizes.collectives("size of the update")]


def _blend(mean: Tensor, found: Tensor, b: Tensor, live: Tensor) -> None:
    b = b.to(mean.dtype)
    mean.copy_(torch.where(live, mean * b + found * (1 - b), mean))
