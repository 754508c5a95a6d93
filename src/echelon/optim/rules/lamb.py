"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2).

    m = beta1 m + (1 - beta1) g                   v = beta2 v + (1 - beta2) g g
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
    w = w - lr (|w| / |r|) r

The norms are of one matrix (of a stack of experts, of each), and the ratio is 1 where one of them is 0. Vectors move by
lr r, as in the authors' own program. One message a step sums both norms of all matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import Rectangle
from echelon.optim.optimizer_state import Kept, elements, number_of_held
from echelon.optim.param_shards import Held
from echelon.optim.reduced_stats import Shared
from echelon.optim.update_rule import Rule, betas_of


class LAMB:
    def __init__(self, held: Sequence[Held], rule: Rule, device: torch.device):
        self._held, self._betas, self._eps = held, betas_of(rule), rule.eps
        self._matrices = [one for one in held if len(one.entry.shape) > 1]
        self._norms = Shared(self._matrices, [2 * one.stack.matrices for one in self._matrices])
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._moments: dict[Held, tuple[Tensor, Tensor]] = {}
        self._numbers = torch.empty(0)
        """of this step: both corrections, and eps"""

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._step += live
        like = self._held[0].exact if self._held else torch.float32
        step = self._step.clamp(min=1).double()
        corrections = [1 - beta**step for beta in self._betas]
        eps = torch.full_like(step, self._eps)
        self._numbers = torch.stack([*corrections, eps]).to(like)
        self._begin()
        squares = self._norms.zeros()
        for one in self._held:
            for part in one.parts:
                found = self._take_in(one, part, scale, live)
                if len(one.entry.shape) > 1 and one.piece.counts:
                    self._norms.of(squares, one).view(2, -1)[:, part.matrix] += found
        self._norms.combine(squares)
        for one in self._held:
            rates = torch.full((1,), lr * one.lr, dtype=squares.dtype, device=squares.device)
            if len(one.entry.shape) > 1:
                weights, towards = self._norms.of(squares, one).view(2, -1).sqrt()
                rates = torch.where((weights > 0) & (towards > 0), weights / towards, 1.0) * (lr * one.lr)
            for part in one.parts:
                self._apply(one, part, rates[part.matrix], live)

    def _take_in(self, one: Held, part: Rectangle, scale: Tensor, live: Tensor) -> Tensor:
        """The new moments; gives the sums of squares of the weights, and of where they move. Padding is 0."""
        mean, square = (state[part.start : part.stop] for state in self._moments[one])
        if one.has_kernels:
            from echelon.kernels.optim import lamb_triton

            high, low = one.weights_of(part)
            gradient = one.unit.grad[one.where(part)]
            return lamb_triton.take_in(
                *(high, low, mean, square, gradient, scale, live, self._numbers), decay=one.decay, betas=self._betas
            )
        g = one.gradient(part, scale).view(-1)
        for moment, beta, new in zip((mean, square), self._betas, (g, g.square()), strict=True):
            moment.copy_(torch.where(live, moment * beta + new * (1 - beta), moment))
        before = one.read(part.start, part.stop)
        return torch.stack([before.square().sum(), self._towards(one, part, before).square().sum()])

    def _apply(self, one: Held, part: Rectangle, rate: Tensor, live: Tensor) -> None:
        if one.has_kernels:
            from echelon.kernels.optim import lamb_triton

            (high, low), (step, place) = one.weights_of(part), one.chance_of(part)
            mean, square = (state[part.start : part.stop] for state in self._moments[one])
            lamb_triton.apply(high, low, mean, square, live, self._numbers, rate, step, decay=one.decay, place=place)
            return
        before = one.read(part.start, part.stop)
        after = before - self._towards(one, part, before) * rate
        one.write(part.start, torch.where(live, after, before))

    def _towards(self, one: Held, part: Rectangle, weights: Tensor) -> Tensor:
        mean, square = (state[part.start : part.stop] for state in self._moments[one])
        found: Tensor = (mean / self._numbers[0]) / ((square / self._numbers[1]).sqrt() + self._eps)
        return found + weights * one.decay if one.decay else found

    def _begin(self) -> None:
        if not self._moments:
            self._moments = {one: (one.zeros(), one.zeros()) for one in self._held}

    def kept(self) -> Iterator[Kept]:
        self._begin()
        yield from number_of_held("step", self._held, self._step)
        for one, moments in self._moments.items():
            for kind, state in zip(("mean", "square"), moments, strict=True):
                yield elements(kind, one.unit, one.piece, state)

    def states(self) -> list[Tensor]:
        return [self._step, *(moment for pair in self._moments.values() for moment in pair)]

    def collectives(self) -> list[Collective]:
        return self._norms.collectives("norms of weights and updates")
